# Every target sets up what it needs: a virtual environment with the tested versions.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?= -n 2

BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(EXTRAS)

.PHONY: demo test test-slow test-oldest check format bench clean

demo: $(READY)
	$(BIN)/hf-grow demo --out demo --overwrite

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

# The same fast tests with the oldest transformers that is supported.
test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python scripts/bench_attention.py

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf .venv .venv-oldest demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
