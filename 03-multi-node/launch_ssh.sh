#!/usr/bin/env bash
# Chapter 3 over ssh, without a queue: start launch_torchrun.sh on each host in the background, show
# its log, or stop it. The hosts must run Linux with bash as the login shell, and have this
# repository at the same path. All arguments after HOSTS_FILE are passed to train_llm.py.
#
#   bash 03-multi-node/launch_ssh.sh start HOSTS_FILE -e my-run --max-steps 100
#   bash 03-multi-node/launch_ssh.sh tail HOSTS_FILE -e my-run
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
[[ "$VERB" =~ ^(start|tail|stop)$ ]] ||
    refuse "Say what to do: launch_ssh.sh start, tail or stop, then HOSTS_FILE and -e NAME."
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
LOGS="$RUN/logs"
# The command line on a host contains first the one, then the other.
COMMAND_PATTERN="launch_torchrun.sh|--rdzv-id $NAME "
export LAUNCH_COMMAND="bash 03-multi-node/launch_ssh.sh start HOSTS_FILE"

# on HOST COMMAND...: run a command in this folder on a host. The host's shell splits the command
# into words again, so each word is quoted.
on() {
    # shellcheck disable=SC2029,SC2086
    ${SSH:-ssh} "$1" "cd $(printf %q "$PWD") && $(printf '%q ' "${@:2}")"
}

case "$VERB" in
start)
    # ssh passes on no variables, so the command sets them.
    NAMES="NPROC_PER_NODE|MAX_RESTARTS|LAST_CALL|PYTHON|PYTHONPATH"
    NAMES+="|(OMP|HF|WANDB|NCCL|GLOO|TORCH|PYTORCH|PET|CUDA|LAUNCH)_.*${FORWARD:+|${FORWARD// /|}}"
    VARIABLES=("NNODES=$NNODES" "HEAD=$HEAD")
    for VARIABLE in $(compgen -e | grep -xE "$NAMES"); do
        VARIABLES+=("$VARIABLE=${!VARIABLE}")
    done
    for HOST in "${HOSTS[@]}"; do
        # setsid keeps it running after ssh has exited. torchrun then has the process id $!.
        on "$HOST" mkdir -p "$LOGS"
        # shellcheck disable=SC2016
        on "$HOST" env "${VARIABLES[@]}" bash -c '
            LOG=$1 NAME=$2 COMMAND_PATTERN=$3; shift 3
            if PID=$(cat "$LOG.pid" 2>/dev/null) &&
                tr "\0" " " 2>/dev/null <"/proc/$PID/cmdline" | grep -qE -- "$COMMAND_PATTERN"; then
                echo "$NAME is already running on this host: stop it first." >&2
                exit 2
            fi
            setsid nohup bash 03-multi-node/launch_torchrun.sh "$@" >>"$LOG.log" 2>&1 </dev/null &
            echo $! >"$LOG.pid"' start "$LOGS/$HOST" "$NAME" "$COMMAND_PATTERN" "$@"
        echo "$HOST: started, log file $LOGS/$HOST.log"
    done
    ;;
tail)
    trap 'kill $(jobs -p) 2>/dev/null' EXIT
    for HOST in "${HOSTS[@]}"; do
        # Do not use `on` here: the background job must be ssh itself, so that the trap ends it.
        # shellcheck disable=SC2029,SC2086
        ${SSH:-ssh} "$HOST" "tail -n 20 -F $(printf %q "$LOGS/$HOST.log")" \
            > >(while IFS= read -r LINE; do echo "$HOST: $LINE"; done) &
    done
    wait
    ;;
stop)
    for HOST in "${HOSTS[@]}"; do
        # torchrun forwards SIGTERM to its processes and waits for them.
        # shellcheck disable=SC2016
        on "$HOST" bash -c '
            if PID=$(cat "$1.pid" 2>/dev/null) &&
                tr "\0" " " 2>/dev/null <"/proc/$PID/cmdline" | grep -qE -- "$3"; then
                kill -TERM "$PID" && echo "told to stop"
            else
                echo "$2 is not running on this host"
            fi' stop "$LOGS/$HOST" "$NAME" "$COMMAND_PATTERN" | sed "s/^/$HOST: /" &
    done
    wait
    ;;
esac
