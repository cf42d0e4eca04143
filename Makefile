# `make demo` and `make test` do all the set-up that they need; both can be run again at any time.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
LIBEXEC := $(VENV)/libexec/hatchway
export HATCHWAY_LIBEXEC := $(CURDIR)/$(LIBEXEC)
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup system test-system venv native demo test test-all lint format types bench docs lock clean

help: ## Shows the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: system venv native ## Installs what is missing: system packages, virtual environment, native programs.

system:
	@scripts/setup-system

test-system:
	@scripts/setup-system --tests

venv: $(VENV)/.installed

$(VENV)/.installed: requirements.lock pyproject.toml
	@scripts/setup-venv $(VENV)

native: venv ## Builds the guest agent, the shim and the preload library.
	@scripts/build-native $(LIBEXEC)

demo: setup ## Starts the service, runs a Python program in a new sandbox, shows its output and the times, leaves nothing running.
	@$(PY) scripts/demo.py

lint: venv ## Style, types and layers.
	$(VENV)/bin/ruff check src tests examples scripts
	$(VENV)/bin/ruff format --check src tests examples scripts
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: venv ## Puts the code in form.
	$(VENV)/bin/ruff check --fix src tests examples scripts
	$(VENV)/bin/ruff format src tests examples scripts

test: setup test-system ## Style, types and layers, then all tests, with all the set-up that they need.
	@scripts/prepare-tests & $(MAKE) --no-print-directory lint && wait
	@scripts/run-tests

bench: setup ## Measures against the bare floor of this machine.
	@scripts/run-bench

docs: venv ## Builds the documentation into site/.
	$(VENV)/bin/mkdocs build --strict --site-dir site

lock: venv ## Resolves the dependencies anew into requirements.lock.
	scripts/lock $(VENV)

clean: ## Removes what was built (not the data folder).
	rm -rf build site $(VENV)
