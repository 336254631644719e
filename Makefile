# `make` lists the targets. Everything runs in a virtual environment of its own, .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
KERNELS := .venv/.kernels
HASHED := .venv/.hashed
COMPAT_TESTS := $(addprefix tests/engines/flower/test_,stock.py patches.py app.py conformance.py admission.py deployment.py\
  healing.py kills.py operations.py polling.py receive.py waiting.py)
# Tests start hundreds of processes: bytecode is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup browser demo reproduce test quick unmixed check lint types format figures screenshots results studies bench docs extras package compat manifests sbom hashes fuzz clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(STAMP) ## a virtual environment in .venv with all that development needs (HASHES=1: of files by known hashes)

$(STAMP): pyproject.toml constraints.txt
	@echo "== setting up .venv (once; a minute or two)"
	$(PYTHON) -m venv .venv
	@rm -f $(HASHED)
	@if [ -n "$(HASHES)" ]; then \
	  touch $(HASHED); \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes --no-deps -r hashes.txt; fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(if $(HASHES),--no-build-isolation) -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null || true # on all cores; some files are templates
	@touch $(STAMP)

# pip leaves what is installed as it is, so nothing in an environment that was made without hashes would be compared.
ifneq ($(HASHES),)
$(STAMP): | unmixed
endif
unmixed:
	@if [ -d .venv ] && [ ! -e $(HASHED) ]; then \
	  echo ".venv was made without hashes: remove it, and run make setup HASHES=1 again"; exit 1; fi

browser: ## Chromium from the system's packages, for the tests of pages (FPLD_BROWSER=none: do without)
	@if [ "$$FPLD_BROWSER" = none ] || command -v "$${FPLD_BROWSER:-chromium}" >/dev/null; then exit 0; fi; \
	echo "== installing Chromium (once)"; \
	as=$$([ $$(id -u) = 0 ] || echo "sudo -n"); \
	$$as env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-liberation >/dev/null 2>&1 \
	|| { $$as env DEBIAN_FRONTEND=noninteractive apt-get update -qq && $$as env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-liberation >/dev/null; } \
	|| { echo "Chromium cannot be installed here: install it by hand, or run FPLD_BROWSER=none make test"; exit 1; }

demo: setup ## the main job: a federation on real text, with its baselines (about five minutes)
	$(BIN)/fpld run

reproduce: setup ## the paper's figures and theorems, with our numbers next to the paper's (under a minute)
	$(BIN)/fpld reproduce all --out out

# Compiled once, by tests of which each needs others: workers that start together would each compile them all.
$(KERNELS): $(STAMP) $(wildcard fpld/codecs/*.py fpld/codecs/*/*.py fpld/rules/*.py)
	@echo "== compiling the codecs (once; half a minute)"
	$(BIN)/python -m pytest -q -n 2 tests/codecs/test_golden.py
	@touch $(KERNELS)

test: setup browser $(KERNELS) ## all tests (four at a time: some only wait)
	$(BIN)/python -m pytest -n 4 --dist worksteal

quick: setup $(KERNELS) ## the tests without the slow ones
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

check: lint types quick ## lint, format, types and the quick tests

lint: setup ## code, spelling and prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/python docs/check_prose.py

types: setup
	$(BIN)/mypy

format: setup ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

figures: setup ## the figures that the docs show
	$(BIN)/python -m docs.make_figures

screenshots: setup browser ## the pictures of pages that the docs show, from a run of the demonstration
	$(BIN)/python docs/make_screenshots.py

results: setup ## the tables and figures of docs/results.md and README, from the results in docs/results/
	$(BIN)/python -m docs.make_tables
	$(BIN)/python -m docs.make_figures --kept

studies: setup ## the studies of allocation and refinement, kept under out/results/ (an hour; goes on where it stopped)
	$(BIN)/python experiments/results.py

bench: setup ## speed of the codecs on this machine, kept under out/bench/ (half an hour)
	$(BIN)/python -m benchmarks.performance

docs: setup ## the documentation site in site/, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

extras: ## install each extra alone into an empty environment and try it (several minutes)
	$(PYTHON) docs/try_extras.py

package: setup ## build wheel and sdist into dist/, check them, install the wheel into an empty environment
	$(BIN)/python docs/try_package.py

# An environment for each version of Flower, with all else from .venv. Flower alone is installed: what a version asks for
# besides may be newer than what the others need.
compat: setup $(KERNELS) ## tests of deployments with Flower 1.41 and the newest (NEXT=flwr-nightly: with that one)
	@set -e; for flower in $(or $(NEXT),'flwr==1.41.*' 'flwr<2'); do \
	  folder=.compat/$$(printf %s "$$flower" | tr -dc 'a-z0-9.-'); \
	  $(BIN)/python -m venv --clear --without-pip $$folder; \
	  shared=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"); \
	  own=$$($$folder/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"); \
	  echo "import site; site.addsitedir('$$shared')" > $$own/shared.pth; \
	  $(BIN)/python -m pip --python $$folder/bin/python install --quiet --no-deps --ignore-installed "$$flower"; \
	  $$folder/bin/python -c "import flwr; print('== Flower', flwr.__version__)"; \
	  $$folder/bin/python -m pytest -q -n 2 --dist worksteal $(COMPAT_TESTS); \
	done

manifests: ## check the files of deploy/ by the schemas of Compose and of Kubernetes, with linters in an environment of their own
	@$(PYTHON) -m venv .compat/manifests
	@.compat/manifests/bin/python -m pip install --quiet --disable-pip-version-check 'check-jsonschema==0.39.*' 'kubernetes-validate==1.31.*'
	.compat/manifests/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	.compat/manifests/bin/kubernetes-validate --strict deploy/kubernetes/site.yaml

sbom: setup ## what a node runs on, as CycloneDX JSON in out/sbom.json
	$(BIN)/python -m docs.dependencies sbom --out out/sbom.json

hashes: setup ## hashes.txt anew, from constraints.txt and the package index
	$(BIN)/python -m docs.dependencies hashes

fuzz: setup ## hostile input of every kind for MINUTES=30, with counts
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),30)

clean: ## remove .venv, caches and outputs
	rm -rf .venv .compat out runs site dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
