# Two commands: `make demo` and `make test`. Each installs what it needs into .venv the first time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test test-ray lint bench gpu-test clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# Re-run only when the dependencies change. torch goes first, so that nothing pulls another build of it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

setup: $(READY)  ## create .venv and install LMWorks with its development tools

demo: $(READY)  ## plan, train, compare and use a small code model on this machine
	$(BIN)/lmworks demo

test: $(READY)  ## the whole test-suite that a CPU can run
	$(BIN)/python -m pytest -m "not gpu and not ray"

test-ray: $(READY)  ## train on a local Ray cluster of two workers (installs the extra `ray`)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,ray]"
	$(BIN)/python -m pytest -m ray

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## the CPU benchmark beside a plain PyTorch loop
	$(BIN)/python benchmarks/train_cpu.py

gpu-test: $(READY)  ## tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
