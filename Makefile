# From a fresh checkout, with Python 3.10 or later and neither a C compiler nor CUDA:
#
#   make matrix ARCH=sm100   compile every kernel of a target, prove a few, pack wheels into dist/
#   make test                lint and tests
#
# Everything is installed into .venv, once; a second `make matrix` compiles and installs nothing.

PYTHON ?= python3
VENV ?= .venv
ARCH ?= sm100
DIST ?= dist
CUBINS ?= build/check-cubins
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')
PYTEST_ARGS ?=

BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
# Simulated on every build; the whole proof, `fa4build verify`, takes hours.
QUICK ?= fwd-*-bf16-hd64-causal fwd_combine-*-bf16-hd64 bwd_preprocess-*-bf16-hd64
ARCHES := $(foreach arch,$(ARCH),--arch $(arch))
CODE := fa4build kernels_src tests device benchmarks tuning

.DEFAULT_GOAL := help
.PHONY: help matrix wheels lint format test test-slow check-cubins clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

matrix: $(RUN_STAMP)
	@$(BIN)/fa4build matrix $(ARCHES)
	@$(BIN)/fa4build verify --simulate $(ARCHES) $(foreach glob,$(QUICK),'$(glob)')
	@$(MAKE) --no-print-directory wheels

wheels: $(RUN_STAMP)
	@$(BIN)/fa4build wheel $(ARCHES) --assert-cached --out $(DIST)
	@printf '\nInstall on a GPU machine, without a network:\n  pip install --no-index --find-links %s fa4-kernels[%s]\n' \
	  "$(DIST)" "$(firstword $(ARCH))"

lint: $(DEV_STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# Files go to workers whole, so that what a file builds once is built once.
test: lint
	$(BIN)/python -m pytest -m "not slow and not upstream" -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-slow: $(DEV_STAMP)
	$(BIN)/python -m pytest -m "slow and not upstream" -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

# The gate for changes that must not change a kernel: compiles the matrix into CUBINS, compares with evidence/.
check-cubins: $(RUN_STAMP)
	@$(BIN)/fa4build matrix --cache-dir $(CUBINS)
	@$(BIN)/python -m tests.check_cubins $(CUBINS)

clean:
	rm -rf $(VENV) $(DIST) build .pytest_cache .ruff_cache .mypy_cache .hypothesis

# A stamp is older than pyproject.toml when what is installed may be out of date.
$(RUN_STAMP): pyproject.toml .ci/venv
	@bash .ci/venv "$(PYTHON)" "$(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
