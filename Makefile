# Every target does its own set-up first; a second run finds the stamp and starts at once.
#   make serve [PORT=8000]     the cluster on this machine, small trained model, no GPU
#   make test                  what CI runs; test-full adds the large matrices; test-layouts: every cut into ranks
#   make check                 formatting, lint, types, import rules, spelling
#   make bench / make gpu      benchmarks / checks on a CUDA device

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
PORT ?= 8000
ARGS ?=
# Empty for GPU machines: `make setup CONSTRAINTS=` takes the newest packages that pyproject.toml allows.
CONSTRAINTS ?= constraints-cpu.txt
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-complete
BENCH_STAMP := $(VENV)/.bench-complete
NEEDED_KIB := 6291456
PACKAGES := kv_transfer glm_runtime prefill_worker decode_worker router cluster
SOURCES := $(PACKAGES) tests benchmarks

.PHONY: help setup serve test test-full test-layouts check format bench gpu clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@command -v $(PYTHON) >/dev/null || { echo "setup: '$(PYTHON)' was not found. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "setup: $$($(PYTHON) --version) is too old; Python 3.11 or newer is needed. Name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "setup: Python's venv module is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@free=$$(df -Pk . | awk 'NR == 2 {print $$4}'); [ -x $(BIN)/glm-cluster ] || [ "$$free" -ge $(NEEDED_KIB) ] || { echo "setup: $$((free / 1024)) MiB are free in $$PWD, $$(($(NEEDED_KIB) / 1024)) MiB are needed (packages take about 3.5 GB, unpacking them some more)."; exit 1; }
	@echo "setup 1/3: virtual environment in $(VENV) with $$($(PYTHON) --version)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "setup 2/3: packages (1.5 GB to download if they are not cached; minutes on a slow line)"
	@started=$$SECONDS; PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on --editable '.[test]' \
		$(addprefix --constraint ,$(CONSTRAINTS)) | sed -u -n -e 's/^\(Collecting\|Processing\|Downloading\|Building\|Installing\|Successfully\) */  \1 /p' -e '/rror/p' | cut -c1-100; \
		echo "setup 3/3: done in $$((SECONDS - started)) s"
	@touch $(STAMP)

serve: $(STAMP)
	@exec $(BIN)/glm-cluster serve --port $(PORT) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-full: $(STAMP)
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

test-layouts: $(STAMP)
	$(BIN)/python -m pytest tests/conformance/test_all_layouts.py $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell $(SOURCES) docs deploy README.md CONTRIBUTING.md CHANGELOG.md Makefile pyproject.toml

format: $(STAMP)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

$(BENCH_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]' $(addprefix --constraint ,$(CONSTRAINTS))
	@touch $(BENCH_STAMP)

gpu: $(STAMP)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
