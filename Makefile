# Each target is a few lines that you could type; README.md spells out the installation.
PYTHON ?= python3
BIN := .venv/bin
SCRIPTS := $(wildcard [0-9][0-9]-*/train_llm.py)

PYTEST := $(BIN)/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder

.PHONY: demo help train diff variant lab site exercises check test ci nightly record diffs sizes lint format clean

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

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: .venv/.train  ## train chapter 1 on the built-in corpus: make train ARGS="-e my-run"
	$(BIN)/python 01-single-gpu/train_llm.py $(ARGS)

# `git diff` ends with 1 if the files differ, and with 141 if nobody reads on, as in `make diff | head`.
diff:  ## what a chapter changes: make diff CHAPTER=2; or any two: FROM=1 TO=4; or CHAPTER=4 WITH=hsdp
	@$(if $(WITH),exec $(PYTHON) -m common.variants --diff "$(CHAPTER)" $(WITH);) \
	to="$(or $(TO),$(CHAPTER))"; from="$(or $(FROM),$$(expr "$$to" - 1 2>/dev/null))"; \
	case "$$from-$$to" in [1-$(words $(SCRIPTS))]-[1-$(words $(SCRIPTS))]) ;; \
	*) echo "make diff CHAPTER=N: N is from 2 to $(words $(SCRIPTS)); or make diff FROM=1 TO=N" >&2; exit 2 ;; esac; \
	git diff --no-index 0$$from-*/train_llm.py 0$$to-*/train_llm.py; case $$? in 0|1|141) ;; *) exit 1 ;; esac

# A copy of a chapter with diffs of the gallery applied: your checkout stays as it is.
variant:  ## a chapter with more options: make variant CHAPTER=4 WITH="hsdp cpu-offload"; or list them
	@$(PYTHON) -m common.variants $(if $(CHAPTER)$(WITH),"$(CHAPTER)" $(WITH))

# Jupyter refuses to start as root, as in most containers, without this option.
ALLOW_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

lab:  ## open a chapter's notebook: make lab CHAPTER=1
	@case "$(CHAPTER)" in [1-$(words $(SCRIPTS))]) ;; *) echo "make lab CHAPTER=N: N is from 1 to $(words $(SCRIPTS))" >&2; exit 2 ;; esac
	@$(MAKE) --no-print-directory .venv/.lab
	$(BIN)/jupyter lab $(ALLOW_ROOT) 0$(CHAPTER)-*/lab.ipynb

site: .venv/.site  ## the guide as a website: make site SERVE=1 shows it until Ctrl-C
	@rm -rf build/site build/doctrees  # Sphinx would leave old sidebars in pages that have not changed
	$(BIN)/sphinx-build --fail-on-warning --quiet -c .site -d build/doctrees . build/site
	@echo "Open build/site/README.html in a browser"
	$(if $(SERVE),$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 0)

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

diffs: .venv/.test  ## renew the .diff files and the tables after a change of a script, before you commit it
	@status=0; for script in "-m tests.renew_diffs" tests/gallery.py tests/benchmarks/report.py; do \
	$(BIN)/python $$script || status=$$?; done; exit $$status

sizes:  ## how large pages, scripts, common, side code and tests are; no test compares the totals
	@$(PYTHON) tests/sizes.py

# The files that git knows and that exist, so a file of your own never matters.
TRACKED := git grep -lzI '' --
NOT_SPELLED := ':!*/recorded/*' ':!common/inputs/presets/tokenizer' ':!*.json*' ':!*.ipynb'

lint: .venv/.test  ## check style and spelling; check, test, ci and nightly begin with it
	$(TRACKED) '*.py' '*.ipynb' | xargs -0 $(BIN)/ruff check
	$(TRACKED) '*.py' '*.ipynb' | xargs -0 $(BIN)/ruff format --check
	$(TRACKED) . $(NOT_SPELLED) | xargs -0 $(BIN)/codespell
	$(TRACKED) '*.sh' '*.sbatch' .ci/run | xargs -0 $(BIN)/shellcheck -x -P SCRIPTDIR

format: .venv/.test  ## format the code; lines that are still too long are listed
	$(TRACKED) '*.py' '*.ipynb' | xargs -0 $(BIN)/ruff check --fix --exit-zero
	$(TRACKED) '*.py' '*.ipynb' | xargs -0 $(BIN)/ruff format

# Without an NVIDIA GPU, this index saves gigabytes of CUDA libraries; `make INDEX= train` leaves it
# out. It is asked once, because pip would retry for minutes if a firewall blocks it.
INDEX ?= https://download.pytorch.org/whl/cpu
# .ci/run has a file with an older torch.
CONSTRAINTS ?= requirements.txt
ASK := import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=2)

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 train" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	@[ -z "$(INDEX)" ] || command -v nvidia-smi > /dev/null || ! $(PYTHON) -c '$(ASK)' $(INDEX)/ 2> /dev/null || \
	printf '[global]\nextra-index-url = %s\n' $(INDEX) > .venv/pip.conf

.venv/.train: .venv/bin/python requirements.txt pyproject.toml
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --editable .
	@touch $@

.venv/.lab: .venv/bin/python requirements.txt pyproject.toml
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --editable '.[lab]'
	@touch $@ .venv/.train

# Without the packages that training needs, which take 1.5 GB.
SITE := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"]["site"])

.venv/.site: .venv/bin/python requirements.txt pyproject.toml
	$(BIN)/python -c '$(SITE)' | xargs $(BIN)/python -m pip install --constraint $(CONSTRAINTS)
	@touch $@

.venv/.test: .venv/bin/python requirements.txt pyproject.toml
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --editable '.[test]'
	@# Apart: where transformers finds it, every start imports it.
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --no-deps --upgrade --target .venv/torchao torchao
	@touch $@ .venv/.train .venv/.site

clean:  ## remove the environment (.venv), so that the next target installs it again
	rm -rf .venv
