#!/usr/bin/env bash
# Chapter 3 on hosts that you reach by ssh, without a queue: starts launch_torchrun.sh on each of
# them in the background, shows what they print, stops them. The hosts run Linux and see this
# repository at the same path, and bash is their login shell.
#
#   bash 03-multi-node/launch_ssh.sh start HOSTS_FILE -e my-run --max-steps 100
#   bash 03-multi-node/launch_ssh.sh tail HOSTS_FILE -e my-run
#   bash 03-multi-node/launch_ssh.sh stop HOSTS_FILE -e my-run
#
# HOSTS_FILE  a host on each line, # for comments; the first one is the head of the rendezvous
# PORT        a free port on the first host
# SSH         the command that reaches a host, if not ssh
# FORWARD     names of more variables that the hosts shall have, separated by spaces
#
# start takes the variables of launch_torchrun.sh too (NPROC_PER_NODE, MAX_RESTARTS, ...). stop lets
# the run save and end; the same `start` goes on with it.
set -euo pipefail

refuse() {
    echo "$1" >&2
    exit 2
}

VERB=${1:-}
[[ "$VERB" =~ ^(start|tail|stop)$ ]] ||
    refuse "Say what to do: launch_ssh.sh start, tail or stop, then HOSTS_FILE and -e NAME."
[[ -r "${2:-}" ]] ||
    refuse "Cannot read the hosts file '${2:-}': give a file with a host on each line."
# In place of mapfile, which bash 3.2 does not have. At the end of the file, read returns 1.
read -r -d '' -a HOSTS < <(sed 's/#.*//; s/[[:space:]]//g' "$2") || true
((${#HOSTS[@]})) || refuse "No host in $2: give a file with a host on each line."
cd "$(dirname "${BASH_SOURCE[0]}")/.."
shift 2

# By its path: the hosts' shells need not know the environment that is active here.
PYTHON=$(command -v "${PYTHON:-python}" || true)
if [[ "${PYTHON##*/}" == python && -z "${VIRTUAL_ENV:-}" && -x .venv/bin/python ]]; then
    PYTHON=$PWD/.venv/bin/python
fi
export PYTHON
export NNODES=${NNODES:-${#HOSTS[@]}} HEAD=${HEAD:-${HOSTS[0]##*@}:${PORT:-29400}}
PLAN=$("$PYTHON" -m common.distributed "$@")
{ read -r NAME && read -r SAVE_DIR; } <<<"$PLAN"
[[ " $*" == *" -e"* || " $*" == *" --experiment-name"* ]] || set -- -e "$NAME" "$@"
[[ "$SAVE_DIR" == /* ]] || SAVE_DIR="$PWD/$SAVE_DIR"
LOGS="$SAVE_DIR/$NAME/logs"
RUNS="launch_torchrun.sh|--rdzv-id $NAME " # what a host runs, at first and then
export LAUNCH_COMMAND="bash 03-multi-node/launch_ssh.sh start HOSTS_FILE"

# on HOST COMMAND...: ssh hands one string to the shell of the host, which takes it apart again.
on() {
    # shellcheck disable=SC2029,SC2086
    ${SSH:-ssh} "$1" "cd $(printf %q "$PWD") && $(printf '%q ' "${@:2}")"
}

case "$VERB" in
start)
    # ssh hands on no variables: these go along in the command.
    NAMES="NPROC_PER_NODE|MAX_RESTARTS|LAST_CALL|PYTHON|PYTHONPATH"
    NAMES+="|(OMP|HF|WANDB|NCCL|GLOO|TORCH|PYTORCH|PET|CUDA|LAUNCH)_.*${FORWARD:+|${FORWARD// /|}}"
    VARIABLES=("NNODES=$NNODES" "HEAD=$HEAD")
    for VARIABLE in $(compgen -e | grep -xE "$NAMES"); do
        VARIABLES+=("$VARIABLE=${!VARIABLE}")
    done
    for HOST in "${HOSTS[@]}"; do
        # A session of its own, so that it stays when ssh goes; its number is torchrun's.
        on "$HOST" mkdir -p "$LOGS"
        # shellcheck disable=SC2016
        on "$HOST" env "${VARIABLES[@]}" bash -c '
            LOG=$1 NAME=$2 RUNS=$3; shift 3
            if PID=$(cat "$LOG.pid" 2>/dev/null) &&
                tr "\0" " " 2>/dev/null <"/proc/$PID/cmdline" | grep -qE -- "$RUNS"; then
                echo "$NAME runs here already: stop it first." >&2
                exit 2
            fi
            setsid nohup bash 03-multi-node/launch_torchrun.sh "$@" >>"$LOG.log" 2>&1 </dev/null &
            echo $! >"$LOG.pid"' start "$LOGS/$HOST" "$NAME" "$RUNS" "$@"
        echo "$HOST: started; it writes to $LOGS/$HOST.log"
    done
    ;;
tail)
    trap 'kill $(jobs -p) 2>/dev/null' EXIT
    for HOST in "${HOSTS[@]}"; do
        # Not through `on`: the job has to be ssh itself, to be ended with this.
        # shellcheck disable=SC2029,SC2086
        ${SSH:-ssh} "$HOST" "tail -n 20 -F $(printf %q "$LOGS/$HOST.log")" \
            > >(while IFS= read -r LINE; do echo "$HOST: $LINE"; done) &
    done
    wait
    ;;
stop)
    for HOST in "${HOSTS[@]}"; do
        # SIGTERM to torchrun, which hands it on to its processes and waits for them.
        # shellcheck disable=SC2016
        on "$HOST" bash -c '
            if PID=$(cat "$1.pid" 2>/dev/null) &&
                tr "\0" " " 2>/dev/null <"/proc/$PID/cmdline" | grep -qE -- "$3"; then
                kill -TERM "$PID" && echo "told to stop"
            else
                echo "nothing of $2 runs here"
            fi' stop "$LOGS/$HOST" "$NAME" "$RUNS" | sed "s/^/$HOST: /" &
    done
    wait
    ;;
esac
