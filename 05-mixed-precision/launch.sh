#!/usr/bin/env bash
# Chapter 5 with torchrun, on one machine or with the same command on every node. This file
# sources 03-multi-node/launch_torchrun.sh, which explains the variables. All arguments are passed
# to train_llm.py.
#
#   bash 05-mixed-precision/launch.sh
#   NPROC_PER_NODE=4 bash 05-mixed-precision/launch.sh --precision tf32
#   NNODES=2 HEAD=node1:29400 bash 05-mixed-precision/launch.sh -e my-run
set -euo pipefail
SCRIPT=05-mixed-precision/train_llm.py
source "$(dirname "${BASH_SOURCE[0]}")/../03-multi-node/launch_torchrun.sh"
