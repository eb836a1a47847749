#!/usr/bin/env bash
# Chapter 3 with plain torchrun: the same line on every node. The torchrun on HEAD waits ten minutes
# for the others; they give up after one minute if it is not there. All arguments go to the script.
# Alone, without variables, it trains on this machine.
#
#   bash 03-multi-node/launch_torchrun.sh
#   NNODES=2 HEAD=node1:29400 bash 03-multi-node/launch_torchrun.sh -e my-run
#   NNODES=1:2 MAX_RESTARTS=3 HEAD=node1:29400 bash 03-multi-node/launch_torchrun.sh -e my-run
#
# NNODES          number of nodes, or MIN:MAX: the run then goes on with those that are there
# HEAD            host:port of the node that keeps the list of who is there; a port that is free
# NPROC_PER_NODE  processes on this node, if not one for each GPU, or 2 without GPUs
# MAX_RESTARTS    how often all processes are started again after a failure
# LAST_CALL       with MIN:MAX, seconds that MIN nodes wait for more of them
# PYTHON          the interpreter, if not the one of the active environment or of .venv
# LAUNCH_FILE     the file that a reader has called, if not this one; its folder has the script
set -euo pipefail
# Slurm's warning goes to all processes. torchrun would die of it, but ignores what was ignored when
# it started; the training script listens.
trap "" USR1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
LAUNCH_FILE=${LAUNCH_FILE:-03-multi-node/launch_torchrun.sh}
SCRIPT="$(dirname "$LAUNCH_FILE")/train_llm.py"

# The environment that `make train` sets up, or the one that is active.
PYTHON=${PYTHON:-python}
if [[ "$PYTHON" == python && -z "${VIRTUAL_ENV:-}" && -x .venv/bin/python ]]; then
    PYTHON=.venv/bin/python
fi

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    exec "$PYTHON" "$SCRIPT" --help
fi

PLAN=$("$PYTHON" -m common.distributed "$@")
{ read -r NAME && read -r SAVE_DIR && read -r PROCESSES && read -r THREADS; } <<<"$PLAN"
if [[ "${NNODES:-1}" != 1 && -z "${HEAD:-}" ]]; then
    echo "Several nodes need to know where to meet: give HEAD=host:port." >&2
    exit 2
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$THREADS}"
# Alone, it need not be known to anybody by its name.
ADDRESS=()
[[ -n "${HEAD:-}" ]] || ADDRESS=(--local-addr localhost)
# For the line with which the script says how the run can go on.
VARIABLES=
for VARIABLE in NNODES HEAD NPROC_PER_NODE MAX_RESTARTS LAST_CALL; do
    [[ -z "${!VARIABLE:-}" ]] || VARIABLES+="$VARIABLE=${!VARIABLE} "
done
export LAUNCH_COMMAND="${LAUNCH_COMMAND:-${VARIABLES}bash $LAUNCH_FILE}"
# torchrun marks the lines that it shows with this. The script's lines name host and rank already.
# shellcheck disable=SC2016
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${role_name}'
# Left to itself, torchrun lets all restarts meet in one store, in which the processes find
# addresses of those that are gone (https://github.com/pytorch/pytorch/issues/135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# Static, for comparison: --nnodes 2 --node-rank 0 (on the other node 1) --master-addr node1
# --master-port 29400 in place of the three --rdzv lines. No node can then come later or go.
exec "$PYTHON" -m torch.distributed.run \
    --nnodes "${NNODES:-1}" \
    --nproc-per-node "$PROCESSES" \
    --rdzv-id "$NAME" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:-localhost:0}" \
    ${ADDRESS[@]+"${ADDRESS[@]}"} \
    --rdzv-conf "last_call_timeout=${LAST_CALL:-30}" \
    --max-restarts "${MAX_RESTARTS:-0}" \
    --log-dir "$SAVE_DIR/$NAME/logs/$(hostname)" \
    --redirects 3 \
    --tee 0:3 \
    --role "" \
    "$SCRIPT" -e "$NAME" "$@"
