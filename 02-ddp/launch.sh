#!/usr/bin/env bash
# Chapter 2 on this machine: one process per GPU or, without GPUs, two processes. To use another
# number of processes, set NPROC_PER_NODE. All arguments are passed to train_llm.py. Relative paths
# start at the root of the repository, wherever you call this file.
#
#   bash 02-ddp/launch.sh
#   bash 02-ddp/launch.sh -e my-run --max-steps 100
#   NPROC_PER_NODE=4 bash 02-ddp/launch.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The interpreter of the active environment or, if there is none, of .venv.
PYTHON=python
if [[ -z "${VIRTUAL_ENV:-}" && -x .venv/bin/python ]]; then
    PYTHON=.venv/bin/python
fi

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    exec "$PYTHON" 02-ddp/train_llm.py --help
fi

# torchrun opens the log files before the script starts, so it needs the run's folder here. Each
# process gets an equal share of the CPU cores; by default torchrun gives it one thread only.
PLAN=$("$PYTHON" -m common.distributed "$@")
{ read -r NAME && read -r SAVE_DIR && read -r PROCESSES && read -r THREADS; } <<<"$PLAN"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$THREADS}"
# The script prints this command in its log, to say how to resume the run.
export LAUNCH_COMMAND="${NPROC_PER_NODE:+NPROC_PER_NODE=$NPROC_PER_NODE }bash 02-ddp/launch.sh"
# Show the lines of rank 0 without torchrun's prefix, because they already contain the rank.
# shellcheck disable=SC2016
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${role_name}'

# The output of each rank and the exception that ended it are in logs/<id>/attempt_0/<rank>/. Rank
# 0's output is also shown here (3 means stdout and stderr).
exec "$PYTHON" -m torch.distributed.run \
    --standalone \
    --nproc-per-node "$PROCESSES" \
    --log-dir "$SAVE_DIR/$NAME/logs" \
    --redirects 3 \
    --tee 0:3 \
    --role "" \
    02-ddp/train_llm.py -e "$NAME" "$@"
