# Each target is a few lines that you could type; README.md spells out the installation.
PYTHON ?= python3
BIN := .venv/bin
SCRIPTS := $(wildcard [0-9][0-9]-*/train_llm.py)

PYTEST := $(BIN)/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder

.PHONY: demo train diff lab exercises check test ci nightly record lint format clean

# A new folder each time, so no earlier run is resumed or replaced.
DEMO := outputs/demo-$(shell date +%Y%m%d-%H%M%S)
# On the CPU, so that two processes need no second GPU.
ON_CPU := CUDA_VISIBLE_DEVICES= WANDB_MODE=disabled
DEMO_FLAGS := --save-dir $(DEMO) --max-steps 100 --log-freq 25

demo: .venv/.train  ## 100 steps of chapter 1, the same of chapter 2 on two processes, and both losses
	$(ON_CPU) $(BIN)/python 01-single-gpu/train_llm.py $(DEMO_FLAGS) -e one $(ARGS)
	$(ON_CPU) NPROC_PER_NODE=2 PYTHON=$(BIN)/python bash 02-ddp/launch.sh $(DEMO_FLAGS) -e two $(ARGS)
	@$(BIN)/python -c 'import json; \
	one, two = ([json.loads(line) for line in open(f"$(DEMO)/{run}/metrics.jsonl")] for run in ("one", "two")); \
	print("step  one process  two processes"); \
	[print("{step:4}{loss:13.6f}".format(**a) + "{loss:15.6f}".format(**b)) for a, b in zip(one, two)]'

train: .venv/.train  ## train chapter 1 on the built-in corpus: make train ARGS="-e my-run"
	$(BIN)/python 01-single-gpu/train_llm.py $(ARGS)

diff:  ## what a chapter changes: make diff CHAPTER=2
	@case "$(CHAPTER)" in [2-$(words $(SCRIPTS))]) ;; *) echo "make diff CHAPTER=N: N is from 2 to $(words $(SCRIPTS))" >&2; exit 2 ;; esac
	@git diff --no-index 0$$(($(CHAPTER) - 1))-*/train_llm.py 0$(CHAPTER)-*/train_llm.py || [ $$? -eq 1 ]

# Jupyter refuses to start as root, as in most containers, without this option.
ALLOW_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

lab: .venv/.lab  ## open a chapter's notebook: make lab CHAPTER=1
	@case "$(CHAPTER)" in [1-$(words $(SCRIPTS))]) ;; *) echo "make lab CHAPTER=N: N is from 1 to $(words $(SCRIPTS))" >&2; exit 2 ;; esac
	$(BIN)/jupyter lab $(ALLOW_ROOT) 0$(CHAPTER)-*/lab.ipynb

exercises: .venv/.test  ## install what the checks of the exercises need; runs no test

check: lint  ## what needs no training: lint, diffs, pages, units; run it after every change
	$(PYTEST) -m check

test: lint  ## the promises on one example each: parity, resume, launch files, pages
	$(PYTEST) -m "not ci and not nightly"

ci: lint  ## the slow tests too, as .ci/run does
	$(PYTEST) -m "not nightly"

nightly: lint  ## everything: all pairs and planted bugs, notebooks, the default training
	$(PYTEST)

record: .venv/.test  ## make the recorded outputs again: make record ONLY='01-single-gpu/recorded/generate*'
	$(BIN)/python tests/record.py $(ONLY)

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/shellcheck -x -P SCRIPTDIR .ci/run [0-9]*/*.sh [0-9]*/*.sbatch common/*.sh

format: .venv/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 train" >&2; exit 2; }
	$(PYTHON) -m venv .venv

.venv/.train: .venv/bin/python requirements.txt pyproject.toml
	$(BIN)/python -m pip install --constraint requirements.txt --editable .
	@touch $@

.venv/.lab: .venv/bin/python requirements.txt pyproject.toml
	$(BIN)/python -m pip install --constraint requirements.txt --editable '.[lab]'
	@touch $@ .venv/.train

.venv/.test: .venv/bin/python requirements.txt pyproject.toml
	$(BIN)/python -m pip install --constraint requirements.txt --editable '.[test]'
	@# Apart: where transformers finds it, every start imports it.
	$(BIN)/python -m pip install --constraint requirements.txt --no-deps --upgrade --target .venv/torchao torchao
	@touch $@ .venv/.train

clean:
	rm -rf .venv
