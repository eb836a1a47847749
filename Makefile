# Each target is one line that you could type; README.md spells them out.
PYTHON ?= python3
BIN := .venv/bin
SCRIPTS := $(wildcard [0-9][0-9]-*/train_llm.py)

PYTEST := $(BIN)/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder

.PHONY: train diff lab check test ci nightly record lint format clean

train: .venv/.train  ## train chapter 1 on the built-in corpus: make train ARGS="-e my-run"
	$(BIN)/python 01-single-gpu/train_llm.py $(ARGS)

diff:  ## what a chapter changes: make diff CHAPTER=2
	@case "$(CHAPTER)" in [2-$(words $(SCRIPTS))]) ;; *) echo "make diff CHAPTER=N: N is from 2 to $(words $(SCRIPTS))" >&2; exit 2 ;; esac
	@git diff --no-index 0$$(($(CHAPTER) - 1))-*/train_llm.py 0$(CHAPTER)-*/train_llm.py || [ $$? -eq 1 ]

lab: .venv/.lab  ## open a chapter's notebook: make lab CHAPTER=1
	@case "$(CHAPTER)" in [1-$(words $(SCRIPTS))]) ;; *) echo "make lab CHAPTER=N: N is from 1 to $(words $(SCRIPTS))" >&2; exit 2 ;; esac
	$(BIN)/jupyter lab 0$(CHAPTER)-*/lab.ipynb

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
	$(BIN)/python -m pip install --quiet --constraint requirements.txt --editable .
	@touch $@

.venv/.lab: .venv/bin/python requirements.txt pyproject.toml
	$(BIN)/python -m pip install --quiet --constraint requirements.txt --editable '.[lab]'
	@touch $@ .venv/.train

.venv/.test: .venv/bin/python requirements.txt pyproject.toml
	$(BIN)/python -m pip install --quiet --constraint requirements.txt --editable '.[test]'
	@# Apart: where transformers finds it, every start imports it.
	$(BIN)/python -m pip install --quiet --constraint requirements.txt --no-deps --upgrade --target .venv/torchao torchao
	@touch $@ .venv/.train

clean:
	rm -rf .venv
