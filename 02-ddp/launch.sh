#!/usr/bin/env bash
# Chapter 2 on this machine: one process per GPU or, without GPUs, two processes. To use another
# number of processes, set NPROC_PER_NODE. All arguments are passed to train_llm.py.
#
#   bash 02-ddp/launch.sh
#   bash 02-ddp/launch.sh -e my-run --max-steps 100
#   NPROC_PER_NODE=4 bash 02-ddp/launch.sh
set -euo pipefail
# Where launch_classifier.sh sources this file, it has set SCRIPT.
[[ "${BASH_SOURCE[0]}" != "$0" ]] || SCRIPT=02-ddp/train_llm.py
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

# By default torchrun gives each process one thread.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$THREADS}"
# The output of each rank and the exception that ended it are in logs/<id>/attempt_0/<rank>/. Rank
# 0's output is also shown here (3 means stdout and stderr).
# --local-addr: a machine may not know its own name, and torchrun would wait for its address.
exec "$PYTHON" -m torch.distributed.run --standalone --local-addr localhost \
    --nproc-per-node "$PROCESSES" \
    --log-dir "$RUN/logs" --redirects 3 --tee 0:3 --role "" \
    "$SCRIPT" "$@"
