# thinwire: every target sets up what it needs; only Python 3.10+ and make must be there.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# What `make train` runs; override any of them: make train METHOD=gtopk:density=0.01 WORKERS=2
RECIPE  ?= digits
METHOD  ?= dgc:warmup=36,dense_below=256
COMPARE ?= dense
WORKERS ?= 4

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
export PYTHONDONTWRITEBYTECODE := # empty: else each of the hundreds of processes of a test run compiles what it imports
.PHONY: help train test lint format setup clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(STAMP)  ## train 4 local workers with DGC beside dense on the digits shipped in the package
	@$(BIN)/thinwire train --recipe $(RECIPE) --workers $(WORKERS) --method $(METHOD) --compare $(COMPARE)

# Three test processes for two cores: ranks wait for each other, and some tests for a timeout.
test: lint  ## everything CI runs: ruff, mypy, pytest
	@echo "== pytest"
	@$(BIN)/pytest -q --durations=20 -n 3 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)  ## ruff and mypy
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy thinwire

format: $(STAMP)  ## let ruff rewrite the sources
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

setup: $(STAMP)  ## only create .venv and install into it

# The constraints file holds for the build environment too (PIP_CONSTRAINT), not only for what is installed. Of what is
# installed only a small part is ever imported, and compiled then (--no-compile).
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "thinwire needs Python 3.10 or newer; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11"; exit 1; }
	@echo "== setting up $(VENV) (once; a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install -qq --disable-pip-version-check \
		--no-compile -c constraints.txt -e '.[dev]'
	@touch $@

clean:  ## remove .venv, caches and build leftovers
	@rm -rf $(VENV) build dist *.egg-info thinwire/kernels/_native.so thinwire/lab/emulation/_relay.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
