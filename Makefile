# FedKin: `make demo` shows it, `make test` checks it. Both need python3 (3.11 or newer) and pip, nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CORE := $(VENV)/.installed-core
DEV := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs
# Since Python 3.12 the interpreter itself says which lines run, which costs less than tracing them.
MEASURE = COVERAGE_CORE=$$($(BIN)/python -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")')

PYTHON_FILES := src tests examples docs/hooks.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint docs clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(CORE) ## install, then compare all methods on real data: under a minute, no download
	@$(BIN)/fedkin demo

test: $(DEV) lint ## install, then lint, types and the fast tests, and how many lines of src these run
	OMP_NUM_THREADS=1 $(MEASURE) $(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal --cov --cov-report=

test-slow: $(DEV) ## the long tests on real data
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

lint: $(DEV) ## ruff (format and rules) and mypy
	$(BIN)/ruff format --check --quiet $(PYTHON_FILES)
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/mypy

docs: $(DOCS) ## the documentation as a site, build/site/index.html
	$(BIN)/mkdocs build --strict --quiet

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "FedKin needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(CORE): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing FedKin into $(VENV); the first time takes a few minutes ..."
	$(PIP) -e ".[web]"
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing FedKin and its development tools into $(VENV); the first time takes a few minutes ..."
	$(PIP) -e ".[dev]"
	@touch $@ $(CORE)

$(DOCS): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing FedKin and what makes its documentation into $(VENV); the first time takes a few minutes ..."
	$(PIP) -e ".[docs]"
	@touch $@
