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
# equally. RUN is the run's local folder, in which the launchers keep the output of each rank.
PLAN=$("$PYTHON" -m common.launch "$@")
{ read -r PROCESSES && read -r THREADS && read -r RUN; } <<<"$PLAN"
# Show the lines of rank 0 without torchrun's prefix, because they already contain the rank.
# shellcheck disable=SC2016
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${role_name}'

# Prints what changes when the run has saved. With --async-checkpoint, state.json has a step only with
# the next save.
checkpoints() {
    grep -s '"step"' "$RUN/state.json" || true
    ls -d "$RUN"/checkpoints/*/.metadata 2>/dev/null || true
}
