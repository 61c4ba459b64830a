# `make run` trains a small model under the dashboard; `make test` runs every check. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.memtop-installed
export HF_HUB_OFFLINE ?= 1

.PHONY: run test lint types contracts ops unit long bench gpu screenshots clean help
.DEFAULT_GOAL := help

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else f"memtop needs Python 3.10 or newer, this is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	touch $@

run: $(STAMP) ## train the default recipe with the dashboard (headless without a terminal)
	$(BIN)/memtop train

test: lint types contracts unit ## every check: lint, types, import contracts, tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

define COMPILE
from memtop.train.compile_lock import await_compiled
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder
for builder in (CPUAdamBuilder(), ShareMemCommBuilder()):
    await_compiled(builder.NAME, what="DeepSpeed")
    builder.load(verbose=False)
endef
export COMPILE

ops: $(STAMP)
	@# DeepSpeed compiles two libraries on first use. The tests start when they are there.
	-DS_ACCELERATOR=cpu $(BIN)/python -c "$$COMPILE"

unit: $(STAMP) ops
	$(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder

long: $(STAMP) ops ## all tests: whole matrices, each program started from scratch, new random examples (an hour)
	MEMTOP_TESTS_EXEC=1 $(BIN)/python -m pytest -q -m "long or not long" -n 2 --dist loadfile --no-loadscope-reorder

bench: $(STAMP) ## measure; prints JSON
	$(BIN)/python -m bench.startup
	$(BIN)/python -m bench.agent_cost
	$(BIN)/python -m bench.supervisor_cost

gpu: $(STAMP) ## on a machine with an NVIDIA GPU: check and measure there; call it again to go on
	$(BIN)/python -m bench.first_half_hour

screenshots: $(STAMP) ## draw docs/screenshots again
	$(BIN)/python docs/make_screenshots.py

clean: ## remove .venv and caches, never runs
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .import_linter_cache
