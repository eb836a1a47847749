#!/usr/bin/env bash
# Chapter 3 with Open MPI's mpirun, which starts the processes over ssh and passes its signals on to
# them. It only launches: the processes talk through NCCL or gloo, not through MPI. All arguments go
# to the script. Run this on any machine that can ssh to the hosts.
#
#   bash 03-multi-node/launch_mpirun.sh
#   HOSTS=node1:8,node2:8 bash 03-multi-node/launch_mpirun.sh -e my-run
#
# HOSTS        host:processes, separated by commas; if absent, this machine, a process for each GPU,
#              or 2 without GPUs
# MASTER_PORT  a free port on the first of them
# SSH          the command that reaches a host, if not ssh
# FORWARD      names of more variables that the hosts shall have, separated by spaces
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The environment that `make train` sets up, or the active one; at the same path on all hosts.
PYTHON=$(command -v "${PYTHON:-python}" || true)
if [[ "${PYTHON##*/}" == python && -z "${VIRTUAL_ENV:-}" && -x .venv/bin/python ]]; then
    PYTHON=$PWD/.venv/bin/python
fi

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    exec "$PYTHON" 03-multi-node/train_llm.py --help
fi

PLAN=$("$PYTHON" -m common.distributed "$@")
{ read -r NAME && read -r SAVE_DIR && read -r PROCESSES && read -r THREADS; } <<<"$PLAN"
HOSTS=${HOSTS:-localhost:$PROCESSES}
RANKS=0
for HOST in ${HOSTS//,/ }; do
    if [[ ! "$HOST" =~ ^[^:]+:[1-9][0-9]*$ ]]; then
        echo "HOSTS must be host:processes, separated by commas, not '$HOSTS'." >&2
        exit 2
    fi
    RANKS=$((RANKS + ${HOST#*:}))
done
export MASTER_ADDR=${HOSTS%%:*}
export MASTER_PORT=${MASTER_PORT:-29500}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$THREADS}"
# For the line with which the script says how the run can go on.
export LAUNCH_COMMAND="HOSTS=$HOSTS bash 03-multi-node/launch_mpirun.sh"

# mpirun hands on only the variables that are named.
NAMES="PYTHONPATH|(OMP|HF|WANDB|NCCL|GLOO|TORCH|PYTORCH|CUDA|LAUNCH)_.*"
NAMES+="${FORWARD:+|${FORWARD// /|}}"
VARIABLES=(-x MASTER_ADDR -x MASTER_PORT)
for VARIABLE in $(compgen -e | grep -xE "$NAMES"); do
    VARIABLES+=(-x "$VARIABLE")
done
[[ "$SAVE_DIR" == /* ]] || SAVE_DIR="$PWD/$SAVE_DIR"
# --bind-to none: else all threads of a process share one core. --output-filename keeps what each
# rank prints. A process that ends with another status than 0 ends all.
exec mpirun \
    -np "$RANKS" \
    -host "$HOSTS" \
    --bind-to none \
    --mca plm_rsh_agent "${SSH:-ssh}" \
    --output-filename "$SAVE_DIR/$NAME/logs" \
    "${VARIABLES[@]}" \
    "$PYTHON" 03-multi-node/train_llm.py -e "$NAME" "$@"
