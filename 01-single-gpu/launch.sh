#!/usr/bin/env bash
# Chapter 1 on one device: the first GPU there is, or the CPU. All arguments go to the script.
#
#   bash 01-single-gpu/launch.sh
#   bash 01-single-gpu/launch.sh -e my-run --max-steps 100
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The environment that `make train` sets up, or the one that is active.
PYTHON=python
if [[ -z "${VIRTUAL_ENV:-}" && -x .venv/bin/python ]]; then
    PYTHON=.venv/bin/python
fi

exec "$PYTHON" 01-single-gpu/train_llm.py "$@"
