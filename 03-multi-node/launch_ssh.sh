#!/usr/bin/env bash
# Chapter 3 over ssh, without a queue: start launch_torchrun.sh on each host in the background, or
# stop it. The hosts must run Linux with bash as the login shell, and have this repository at the
# same path. All arguments after HOSTS_FILE are passed to train_llm.py.
#
#   bash 03-multi-node/launch_ssh.sh start HOSTS_FILE -e my-run --max-steps 100
#   bash 03-multi-node/launch_ssh.sh stop HOSTS_FILE -e my-run
#
# HOSTS_FILE  one host per line, # starts a comment; the first host serves the rendezvous
# PORT        a free port on the first host (default: 29400)
# SSH         the command that logs in to a host (default: ssh)
# FORWARD     names of more variables to pass on to the hosts, separated by spaces
#
# `start` also takes the variables of launch_torchrun.sh, such as NPROC_PER_NODE. `stop` makes the
# run save and exit; the same `start` resumes it.
set -euo pipefail

refuse() {
    echo "$1" >&2
    exit 2
}

VERB=${1:-}
[[ "$VERB" =~ ^(start|stop)$ ]] ||
    refuse "Say what to do: launch_ssh.sh start or stop, then HOSTS_FILE and -e NAME."
[[ -r "${2:-}" ]] ||
    refuse "Cannot read HOSTS_FILE '${2:-}': give a file with one host per line."
# bash 3.2 has no mapfile. At the end of the file, read returns 1.
read -r -d '' -a HOSTS < <(sed 's/#.*//; s/[[:space:]]//g' "$2") || true
[[ " ${*:3}" =~ \ (-e|--experiment-name|@|-h|--help) ]] || refuse "Give the run a name with -e."
((${#HOSTS[@]})) || refuse "HOSTS_FILE $2 contains no host: give a file with one host per line."
shift 2

export NNODES=${NNODES:-${#HOSTS[@]}} HEAD=${HEAD:-${HOSTS[0]##*@}:${PORT:-29400}}
SCRIPT=03-multi-node/train_llm.py
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"
export PYTHON # its full path, because the environment is not active on the hosts
[[ "$RUN" == /* ]] || RUN=$PWD/$RUN
NAME=$(basename "$RUN")
# The agent's command line: first the launch file, then torchrun.
AGENT="launch_torchrun.sh|--rdzv-id $NAME "

# ssh passes on no variables, so the command sets them.
NAMES="NPROC_PER_NODE|MAX_RESTARTS|LAST_CALL|PYTHON|PYTHONPATH"
NAMES+="|(OMP|HF|WANDB|NCCL|GLOO|TORCH|PYTORCH|PET|CUDA)_.*${FORWARD:+|${FORWARD// /|}}"
VARIABLES=("NNODES=$NNODES" "HEAD=$HEAD")
for VARIABLE in $(compgen -e | grep -xE "$NAMES"); do
    VARIABLES+=("$VARIABLE=${!VARIABLE}")
done

for HOST in "${HOSTS[@]}"; do
    LOG="$RUN/logs/$HOST"
    # setsid keeps the agent running after ssh has exited. torchrun forwards SIGTERM to its processes.
    # shellcheck disable=SC2016
    if [[ "$VERB" == start ]]; then
        COMMAND='
            mkdir -p "$(dirname "$1")"
            ! pgrep -F "$1.pid" -f -- "$2" >/dev/null 2>&1 || { echo "already running"; exit 2; }
            setsid nohup bash 03-multi-node/launch_torchrun.sh "${@:3}" >>"$1.log" 2>&1 </dev/null &
            echo $! >"$1.pid"
            echo "started, log file $1.log"'
    else
        COMMAND='pkill -TERM -F "$1.pid" -f -- "$2" && echo "told to stop" || echo "not running"'
    fi
    # The host's shell splits the command into words again, so each word is quoted.
    # shellcheck disable=SC2029,SC2086
    ${SSH:-ssh} "$HOST" "cd $(printf %q "$PWD") && env $(printf '%q ' "${VARIABLES[@]}") \
        bash -c $(printf '%q ' "$COMMAND" "$VERB" "$LOG" "$AGENT" "$@")" | sed "s/^/$HOST: /"
done
