# `make` lists the targets. Everything runs in a virtual environment of its own, .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo reproduce test quick check lint types format figures results bench clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(STAMP) ## a virtual environment in .venv with all that development needs

$(STAMP): pyproject.toml constraints.txt
	@echo "== setting up .venv (once; a minute or two)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: setup ## the main job: a federation on real text, with its baselines (three to four minutes)
	$(BIN)/fpld run

reproduce: setup ## the paper's figures and theorems, with our numbers next to the paper's (under a minute)
	$(BIN)/fpld reproduce all --out out

test: setup ## all tests
	$(BIN)/python -m pytest -n 2

quick: setup ## the tests without the slow ones
	$(BIN)/python -m pytest -n 2 -m "not slow"

check: lint types quick ## lint, format, types and the quick tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

figures: setup ## the figures that the docs show
	$(BIN)/python docs/make_figures.py

results: setup ## docs/results.md from runs, kept under out/results/ (an hour; goes on where it stopped)
	$(BIN)/python experiments/results.py

bench: setup ## docs/performance.md from measurements on this machine (ten minutes)
	$(BIN)/python -m benchmarks.performance

clean: ## remove .venv, caches and outputs
	rm -rf .venv out runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
