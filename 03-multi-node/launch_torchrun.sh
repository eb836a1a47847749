#!/usr/bin/env bash
# Chapter 3 with torchrun: run the same command on every node. The node in HEAD waits ten minutes
# for the other nodes, and they try for one minute to reach it. Without variables, only this machine
# trains. All arguments are passed to train_llm.py.
#
#   bash 03-multi-node/launch_torchrun.sh
#   NNODES=2 HEAD=node1:29400 bash 03-multi-node/launch_torchrun.sh -e my-run
#   NNODES=1:2 MAX_RESTARTS=3 HEAD=node1:29400 bash 03-multi-node/launch_torchrun.sh -e my-run
#
# NNODES          number of nodes (default: 1), or MIN:MAX if nodes may join and leave the run
# HEAD            rendezvous address host:port: one of the nodes, and a free port of that node
# NPROC_PER_NODE  processes on this node (default: one per GPU or, without GPUs, two)
# MAX_RESTARTS    how often torchrun restarts all processes after a failure (default: 0); needs -e
# LAST_CALL       with MIN:MAX, seconds that MIN nodes wait for more nodes (default: 30)
# PYTHON          the interpreter (default: the one of the active environment or of .venv)
set -euo pipefail
# Slurm sends USR1 to all processes, and it would kill torchrun. A signal that is ignored here stays
# ignored in torchrun, while train_llm.py installs a handler for it.
trap "" USR1
# Where another launch file sources this one, that file has set SCRIPT.
[[ "${BASH_SOURCE[0]}" != "$0" ]] || SCRIPT=03-multi-node/train_llm.py
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"

if [[ "${NNODES:-1}" != 1 && -z "${HEAD:-}" ]]; then
    echo "A run on several nodes needs a rendezvous address: set HEAD=host:port." >&2
    exit 2
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$THREADS}"
# A single node uses localhost, because its own host name may not resolve.
ADDRESS=()
[[ -n "${HEAD:-}" ]] || ADDRESS=(--local-addr localhost)
# By default all restarts share one store, in which processes can find addresses of processes that
# no longer exist (https://github.com/pytorch/pytorch/issues/135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# A static rendezvous has --nnodes 2 --node-rank 0 (on the other node 1) --master-addr node1
# --master-port 29400 instead of the --rdzv flags. Then no node can join or leave during the run.
exec "$PYTHON" -m torch.distributed.run \
    --nnodes "${NNODES:-1}" \
    --nproc-per-node "$PROCESSES" \
    --rdzv-id "$(basename "$RUN")" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:-localhost:0}" \
    ${ADDRESS[@]+"${ADDRESS[@]}"} \
    --rdzv-conf "last_call_timeout=${LAST_CALL:-30}" \
    --max-restarts "${MAX_RESTARTS:-0}" \
    --log-dir "$RUN/logs/$(hostname)" --redirects 3 --tee 0:3 --role "" \
    "$SCRIPT" "$@"
