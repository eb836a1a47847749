#!/usr/bin/env bash
# Train the classifier on this machine, as launch.sh trains, which this file sources. All arguments
# are passed to train_classifier.py.
#
#   bash 02-ddp/launch_classifier.sh
#   NPROC_PER_NODE=4 bash 02-ddp/launch_classifier.sh -e my-run --max-steps 100
set -euo pipefail
SCRIPT=02-ddp/train_classifier.py
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
