# `make demo` and `make test` set everything up by themselves; the second run is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2

export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-slow test-data test-adapters lint types format bench ci clean constraints

help:                 ## what there is to do
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

demo: $(READY)        ## three real training jobs, scheduled on this machine; a report at the end (< 6 minutes)
	@$(BIN)/icefrog demo

test: $(READY)        ## all tests that need no service (minutes)
	@$(BIN)/python -m pytest -n $(JOBS) -m "not slow and not published and not adapters"

test-slow: $(READY)   ## the heavier groups: fault storms, larger searches, the demo itself
	@$(BIN)/python -m pytest -n $(JOBS) -m "slow and not published and not adapters"

test-data: $(READY)   ## published results, from the public measurements in $$ICEFROG_DATA
	@$(BIN)/python -m pytest -n $(JOBS) -m "data or published"

test-adapters:        ## the adapters, against the real libraries, in an environment of their own (once: 2 GB)
	@test -x .venv-adapters/bin/python || $(PYTHON) -m venv .venv-adapters
	@.venv-adapters/bin/python -m pip install --quiet --disable-pip-version-check \
	  -e '.[huggingface,lightning,examples]' 'pytest>=8.3' 'hypothesis>=6.100'
	@.venv-adapters/bin/python -m pytest -m adapters tests/integrations

lint: $(READY)        ## style and banned imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY)       ## strict type check
	@$(BIN)/mypy

format: $(READY)      ## put the code into the house style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(READY)       ## benchmarks; each prints ratios from one run
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

ci:                   ## what CI runs
	@bash .ci/run

constraints: $(READY) ## write the installed versions to constraints.txt
	@(head -n 1 constraints.txt; $(BIN)/pip freeze --exclude-editable | sed 's/+cpu//') > constraints.new
	@mv constraints.new constraints.txt

clean:                ## remove the virtual environment and caches (not your runs)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11" >&2; echo "hint: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@echo "setting up $(VENV) (once; a minute or two) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples]'
	@touch $@
