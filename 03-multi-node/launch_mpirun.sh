#!/usr/bin/env bash
# Chapter 3 with Open MPI. mpirun starts the processes over ssh and forwards signals to them. The
# processes communicate through NCCL or gloo, not through MPI. All arguments are passed to
# train_llm.py. Run this on any machine that can log in to the hosts with ssh.
#
#   bash 03-multi-node/launch_mpirun.sh
#   HOSTS=node1:8,node2:8 bash 03-multi-node/launch_mpirun.sh -e my-run
#
# HOSTS        host:processes, separated by commas (default: this machine, with one process per GPU
#              or, without GPUs, two processes)
# MASTER_PORT  a free port on the first host (default: 29500)
# SSH          the command that logs in to a host (default: ssh)
# FORWARD      names of more variables to pass on to the processes, separated by spaces
set -euo pipefail
SCRIPT=03-multi-node/train_llm.py
DEFAULT_NAME="mpirun-$(date +%Y-%m-%d-%H-%M-%S)" # mpirun would overwrite the logs of another run
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

HOSTS=${HOSTS:-localhost:$PROCESSES}
RANKS=0
for HOST in ${HOSTS//,/ }; do
    if [[ ! "$HOST" =~ ^[^:]+:[1-9][0-9]*$ ]]; then
        echo "HOSTS is '$HOSTS': give host:processes, such as node1:8,node2:8." >&2
        exit 2
    fi
    RANKS=$((RANKS + ${HOST#*:}))
done
export MASTER_ADDR=${HOSTS%%:*}
export MASTER_PORT=${MASTER_PORT:-29500}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$THREADS}"

# mpirun passes on only the variables that are given with -x.
NAMES="PYTHONPATH|(OMP|HF|WANDB|NCCL|GLOO|TORCH|PYTORCH|CUDA|LAUNCH)_.*"
NAMES+="${FORWARD:+|${FORWARD// /|}}"
VARIABLES=(-x MASTER_ADDR -x MASTER_PORT)
for VARIABLE in $(compgen -e | grep -xE "$NAMES"); do
    VARIABLES+=(-x "$VARIABLE")
done
[[ "$RUN" == /* ]] || RUN=$PWD/$RUN
# Without --bind-to none, all threads of a process would share one core. --output-filename keeps the
# output of each rank. If a process fails, mpirun ends all others.
exec mpirun \
    -np "$RANKS" \
    -host "$HOSTS" \
    --bind-to none \
    --mca plm_rsh_agent "${SSH:-ssh}" \
    --output-filename "$RUN/logs" \
    "${VARIABLES[@]}" \
    "$PYTHON" "$SCRIPT" "$@"
