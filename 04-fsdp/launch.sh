#!/usr/bin/env bash
# Chapter 4 with torchrun, on one machine or with the same command on every node. This file
# sources 03-multi-node/launch_torchrun.sh, which explains the variables. All arguments are passed
# to train_llm.py.
#
#   bash 04-fsdp/launch.sh
#   NPROC_PER_NODE=4 bash 04-fsdp/launch.sh --activation-checkpointing
#   NNODES=2 HEAD=node1:29400 bash 04-fsdp/launch.sh -e my-run
set -euo pipefail
SCRIPT=04-fsdp/train_llm.py
source "$(dirname "${BASH_SOURCE[0]}")/../03-multi-node/launch_torchrun.sh"
