#!/usr/bin/env bash
# Chapter 2 on all GPUs of this machine; without a GPU, in 2 processes. All arguments go to the
# script. NPROC_PER_NODE is the number of processes, if it shall be another one. Paths count from the
# repository's root, wherever this is called.
#
#   bash 02-ddp/launch.sh
#   bash 02-ddp/launch.sh -e my-run --max-steps 100
#   NPROC_PER_NODE=4 bash 02-ddp/launch.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The environment that `make train` sets up, or the one that is active.
PYTHON=python
if [[ -z "${VIRTUAL_ENV:-}" && -x .venv/bin/python ]]; then
    PYTHON=.venv/bin/python
fi

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    exec "$PYTHON" 02-ddp/train_llm.py --help
fi

# torchrun opens the logs before the script has read its arguments: the run's folder is needed here.
# The processes share the cores: left to itself, each would take them all, or torchrun give it one.
PLAN=$("$PYTHON" -m common.distributed "$@")
{ read -r NAME && read -r SAVE_DIR && read -r PROCESSES && read -r THREADS; } <<<"$PLAN"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$THREADS}"
# For the line with which the script says how the run can go on.
export LAUNCH_COMMAND="${NPROC_PER_NODE:+NPROC_PER_NODE=$NPROC_PER_NODE }bash 02-ddp/launch.sh"
# torchrun marks the lines that it shows with this. The script's lines name their rank already.
# shellcheck disable=SC2016
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${role_name}'

# What each rank prints, and the exception that it died of, goes to logs/<id>/attempt_0/<rank>/;
# rank 0 is shown here as well (3: stdout and stderr).
exec "$PYTHON" -m torch.distributed.run \
    --standalone \
    --nproc-per-node "$PROCESSES" \
    --log-dir "$SAVE_DIR/$NAME/logs" \
    --redirects 3 \
    --tee 0:3 \
    --role "" \
    02-ddp/train_llm.py -e "$NAME" "$@"
