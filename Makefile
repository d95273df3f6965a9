# Every target does its own set-up: a bare clone and a bare python3 (3.11 or newer) are enough.
#
#   PYTHON=python3.12   the Python that makes the environment (test-gpu: that runs the tests)
#   TORCH_FROM="..."    more options for installing torch, such as --index-url of a build without CUDA
PYTHON ?= python3
TORCH_FROM ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check --no-input
CODE := src tests benchmarks examples

is_new_enough = import sys; print(sys.version_info >= (3, 11))
python_found = $(shell $(PYTHON) -c '$(is_new_enough)' 2>/dev/null)
python_version = $(shell $(PYTHON) --version 2>&1 | tail -n 1)
need_python = $(if $(filter True,$(python_found)),,$(error Weft needs Python 3.11 or newer, but \
$(PYTHON) is: $(or $(python_version),not there); name another one, such as make PYTHON=python3.12))

.PHONY: help setup demo test test-rest soak check test-gpu bench format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## the environment in .venv; every other target does this first

# Interrupted half way, this goes on where it was: what is installed already costs pip a second.
$(READY): pyproject.toml constraints.txt
	$(if $(wildcard $(BIN)/python),,$(need_python))
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || \
		{ echo "set-up: environment in $(VENV) ($(python_version))"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "set-up: torch (large: minutes on the first time)"
	@$(PIP) install -c constraints.txt $(TORCH_FROM) torch
	@echo "set-up: Weft and its tools"
	@$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $(READY)

demo: $(READY)  ## train sixteen models on the graph that comes with Weft, live, with a report
	@$(BIN)/weft run examples/demo.toml --out runs/demo --overwrite

# A worker per core and one thread per worker: threads of several workers would wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test: $(READY)  ## the test suite in at most ten minutes on two cores; what needs a GPU is skipped without one
	$(PYTEST) -m "not rest" -n logical --maxprocesses 8 $(TESTS)

test-rest: $(READY)  ## the longer tests: interpreted kernels, servers that are killed, a Ray cluster that loses a node
	$(PYTEST) -m rest -n logical --maxprocesses 8 $(TESTS)

soak: $(READY)  ## kills, failing system calls and misbehaving models against a real server, what runs where: about 40 minutes
	PYTHONPATH=src:. OMP_NUM_THREADS=1 $(BIN)/python -m tests.serve.soak $(PARTS)

check: $(READY)  ## lint, format, types
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

# Several processes, because most of the time is spent compiling kernels (plug-ins that cannot be parallel are off).
test-gpu:  ## the tests that need a GPU, with the Python that has torch, pytest and pytest-xdist: PYTHON=...
	PYTHONPATH=src:. $(PYTHON) -m pytest -m gpu -n 10 -p no:cacheprovider -p no:benchmark $(TESTS)

bench: $(READY)  ## Weft against PyG on this CPU; benchmarks/README.md has the GPU ones
	$(BIN)/python -m benchmarks.suites.cpu

format: $(READY)  ## lint and format, repairing what can be
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

clean:  ## remove the environment and what builds left (runs/ stays)
	rm -rf $(VENV) build dist *.egg-info
