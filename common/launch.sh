# shellcheck shell=bash disable=SC2034
# What the launch files share; they source it. Sets PYTHON, PROCESSES, THREADS and RUN, and makes the
# root of the repository the working directory, so relative paths start there.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

# The interpreter of the active environment or, if there is none, of .venv. On all hosts it has the
# same path.
PYTHON=${PYTHON:-python}
if [[ "$PYTHON" == python && -z "${VIRTUAL_ENV:-}" && -x .venv/bin/python ]]; then
    PYTHON=$PWD/.venv/bin/python
fi
PYTHON=$(command -v "$PYTHON" || echo "$PYTHON")

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    "$PYTHON" "$SCRIPT" --help # without exec, because PYTHON may be a function
    exit
fi

# A launch file can set the name that a run gets without -e.
if [[ -n "${DEFAULT_NAME:-}" && " $*" != *" -e"* && " $*" != *" --experiment-name"* ]]; then
    set -- -e "$DEFAULT_NAME" "$@"
fi

# One process per GPU or, without GPUs, two; NPROC_PER_NODE sets another number. They share the cores
# equally. PyTorch knows which GPUs this job may use (CUDA_VISIBLE_DEVICES).
PROCESSES=${NPROC_PER_NODE:-}
if [[ -z "$PROCESSES" ]] && { [[ -e /dev/kfd ]] || command -v nvidia-smi >/dev/null; }; then
    PROCESSES=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')
fi
PROCESSES=${PROCESSES:-2}
if [[ ! "$PROCESSES" =~ ^[1-9][0-9]*$ ]]; then
    echo "NPROC_PER_NODE is '$PROCESSES', which is not a number of processes." >&2
    exit 2
fi
CORES=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
THREADS=$((CORES > PROCESSES ? CORES / PROCESSES : 1))

# RUN is the run's folder, in which the launchers keep the output of each rank.
RUN=$("$PYTHON" common/arguments.py "$@")
# torchrun would handle a hang-up that nohup has made this process ignore, and end the run.
if [[ -n "$(trap -p HUP)" ]]; then
    export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT
fi
# Show the lines of rank 0 without torchrun's prefix, because they already contain the rank.
# shellcheck disable=SC2016
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${role_name}'

# --- the end of a Slurm job ---

NEWEST=$(cat "$RUN/newest" 2>/dev/null || true) # the newest checkpoint before this start

# end_job STATUS: exit with the status of srun. Before that, requeue the job if the run saved after a
# signal and wrote `requeue`, or if it failed after it had saved a new checkpoint. A cancelled job is
# no longer running and is not requeued.
end_job() {
    ls "$RUN" >/dev/null 2>&1 || true # makes a network file system update its view of the folder
    REQUEUE=$(cat "$RUN/requeue" 2>/dev/null || true)
    if [[ "$REQUEUE" != "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0}" ]] &&
        { (($1 == 0)) || [[ "$(cat "$RUN/newest" 2>/dev/null || true)" == "$NEWEST" ]]; }; then
        exit "$1"
    fi
    for _ in 1 2 3 4 5; do # a busy controller may not answer
        STATE=$(squeue --noheader --job "$SLURM_JOB_ID" --format %T) && break
        sleep 5
    done
    if [[ "${STATE:-unknown}" == RUNNING ]]; then
        echo "The run resumes when the job starts again."
        scontrol requeue "$SLURM_JOB_ID"
    else # tracebacks may hide where the run was saved
        grep -s "^Told to stop" "/proc/$$/fd/2" | tail -n 1 || true
    fi
    exit "$(($1 ? $1 : 75))" # 75 is EX_TEMPFAIL: try again later
}
