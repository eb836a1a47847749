#!/usr/bin/env bash
# Chapter 1 on one device: the first GPU or, without GPUs, the CPU. All arguments are passed to
# train_llm.py.
#
#   bash 01-single-gpu/launch.sh
#   bash 01-single-gpu/launch.sh -e my-run --max-steps 100
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The interpreter of the active environment or, if there is none, of .venv.
PYTHON=python
if [[ -z "${VIRTUAL_ENV:-}" && -x .venv/bin/python ]]; then
    PYTHON=.venv/bin/python
fi

exec "$PYTHON" 01-single-gpu/train_llm.py "$@"
