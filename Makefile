# Every target does its own set-up: a bare clone and a bare python3 (>= 3.11) are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test check test-gpu bench format clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

demo: $(READY)  ## train a real sweep of models on the embedded graph
	$(BIN)/weft run examples/demo.toml --out runs/demo

test: $(READY)  ## the whole test suite; GPU tests skip where there is none
	$(BIN)/python -m pytest -n auto

check: $(READY)  ## lint, format, types
	$(BIN)/ruff check weft tests benchmarks
	$(BIN)/ruff format --check weft tests benchmarks
	$(BIN)/mypy

test-gpu:  ## on a machine with a GPU, with the python that holds torch (PYTHON=...)
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu -p no:cacheprovider

bench: $(READY)  ## CPU benchmarks; benchmarks/README.md has the GPU ones
	$(BIN)/python -m benchmarks.cpu

format: $(READY)
	$(BIN)/ruff check --fix weft tests benchmarks
	$(BIN)/ruff format weft tests benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info
