# Every target sets up what it needs: a virtual environment with the tested versions.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
PYTEST_ARGS ?= -n 2

BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(EXTRAS)
PIP := install --quiet --disable-pip-version-check

.PHONY: demo test test-slow test-oldest check format bench clean

demo: $(READY)
	$(BIN)/hf-grow demo --out demo

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

# The same fast tests with the oldest transformers that is supported.
test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=.venv-oldest/constraints.txt

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python scripts/bench_attention.py

CONSTRAINTS ?= constraints.txt

# Torch first and alone: a range, asked for by another package, could bring another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	grep -v -E '^(transformers|huggingface-hub|httpx2|httpcore2)==' constraints.txt > $(VENV)/constraints.txt
	echo 'transformers==5.16.0' >> $(VENV)/constraints.txt
	$(BIN)/pip $(PIP) -c $(CONSTRAINTS) torch
	$(BIN)/pip $(PIP) -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf .venv .venv-oldest demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
