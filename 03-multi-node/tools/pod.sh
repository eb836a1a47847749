#!/usr/bin/env bash
# What a pod of kubernetes.yaml runs: one torchrun agent. All arguments are passed to train_llm.py.
#
# JOB_COMPLETION_INDEX  the number of this pod; Kubernetes sets it in an Indexed Job
# NNODES, HEAD          see launch_torchrun.sh; HEAD has the name that other pods know pod 0 by
#
# The exit status is 0 if the run is complete, 75 if it was stopped or has failed after a new
# checkpoint, so that it can resume, and another one if it has failed before.
set -euo pipefail
SCRIPT=03-multi-node/train_llm.py
source "$(dirname "${BASH_SOURCE[0]}")/../../common/launch.sh" # sets RUN and NEWEST

trap 'exit 75' TERM # nothing has started yet
if [[ "$JOB_COMPLETION_INDEX" == 0 ]]; then
    HEAD="$(hostname):${HEAD##*:}" # DNS may not know the name of this pod yet
else
    # Without pod 0, the agents of the other pods would fail after a minute. Its image may still load.
    echo "Waiting for pod 0 at $HEAD"
    until timeout 5 bash -c ": <'/dev/tcp/${HEAD%:*}/${HEAD##*:}'" 2>/dev/null; do
        if ((SECONDS > 1800)); then # for example because pod 0 has completed the run
            echo "Pod 0 did not answer for 30 minutes." >&2
            exit 1
        fi
        sleep 1 &
        wait "$!" || true # unlike sleep, wait ends at a signal, so the trap runs at once
    done
fi
export HEAD

# A run that is told to stop writes the file `requeue`. An older file is from an earlier stop: rank 0
# deletes it when all pods have started again.
requeue_file() {
    ls "$RUN" >/dev/null 2>&1 || true # makes a network file system update its view of the folder
    stat -c "%i %y" "$RUN/requeue" 2>/dev/null || true
}
OLD_FILE=$(requeue_file)
told_to_stop() {
    local file
    file=$(requeue_file)
    [[ -n "$file" && "$file" != "$OLD_FILE" ]]
}

# Kubernetes sends SIGTERM to this shell only, which is the first process of its container.
bash 03-multi-node/launch_torchrun.sh "$@" &
AGENT=$!
trap 'kill -TERM "$AGENT" 2>/dev/null || true' TERM

# A run stops on all pods if one pod is told to. When its processes have ended, the agent of another
# pod waits up to five minutes for the agent that was told to stop, and handles no signal meanwhile.
while kill -0 "$AGENT" 2>/dev/null; do
    if told_to_stop && [[ -z "$(cat "/proc/$AGENT"/task/*/children 2>/dev/null)" ]]; then
        sleep 2 || true # the agent prints the last lines of its processes
        kill -KILL "$AGENT" 2>/dev/null || true
        break
    fi
    sleep 1 &
    wait "$!" || true
done
STATUS=0
wait "$AGENT" || STATUS=$?

if told_to_stop; then
    exit 75 # EX_TEMPFAIL: try again later
fi
if ((STATUS != 0)) && [[ "$(cat "$RUN/newest" 2>/dev/null || true)" != "$NEWEST" ]]; then
    exit 75
fi
exit "$STATUS"
