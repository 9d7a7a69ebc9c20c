# Every target sets itself up: the first one makes .venv and installs into it what it needs.
#
#   PYTHON=python3.12   which Python makes .venv (3.11 or newer)
#   JOBS=2              how many processes pytest uses; 0 keeps it in one, for a debugger
#   ARGS="-k drtp"      more words for pytest
#   RULES=all           further rules for the demo: all, or some, as drtp,dfa

PYTHON ?= python3
JOBS ?= 2
ARGS ?=
RULES ?=

PY := .venv/bin/python
RUN := .venv/.installed
DEV := .venv/.installed-dev
FLEET := .venv-fleet/.installed
PLUGINS := $(foreach name,adapt export family parallel peers probes sklearn streams,-e plugins/$(name))

# For `make units`: tests of what computes, and settings that lower the vector units torch uses.
CORE := tests/nets tests/maths tests/zoo tests/test_matrix.py tests/test_objectives.py \
  tests/test_losses.py tests/test_train.py tests/test_locality.py tests/engine/fast \
  tests/engine/test_backprop.py tests/saved/test_round_trip.py tests/benchmarks/test_fuzz_layers.py
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2,ATEN_CPU_CAPABILITY=avx2
SSE41 := ONEDNN_MAX_CPU_ISA=SSE41,ATEN_CPU_CAPABILITY=default
UNITS := $(AVX2),TEST_THREADS=1 $(AVX2),TEST_THREADS=2 $(SSE41),TEST_THREADS=1 TEST_THREADS=2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup demo test test-all units lint types pytest fleet mutants format docs clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(RUN) ## compare local rules with backprop on the digits, with three nets; pages in demo/
	.venv/bin/tpsgd demo $(if $(RULES),--rules $(RULES)) --out demo --overwrite

test: lint types pytest ## lint, type-check, the quick tests: four minutes on two cores

lint: $(DEV) ## ruff: lint and formatting
	@echo "ruff"
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --quiet --check . || { echo "ruff format: 'make format' repairs this"; exit 1; }

types: $(DEV) ## pyright on src
	@echo "pyright"
	@$(PY) -m pyright --pythonpath $(PY)

pytest: $(DEV) ## the quick tests alone; make pytest ARGS="-k drtp"
	@$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not full" $(ARGS)

test-all: $(DEV) ## the other tests: whole products, emulators, browsers, killed processes, many ranks
	@$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m full $(ARGS)

units: $(DEV) ## the core tests with the vector units of older CPUs, and with two threads
	@set -e; for unit in $(UNITS); do echo "$$unit"; \
	  env $$(echo $$unit | tr , ' ') OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0 \
	    $(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not full" $(CORE) $(ARGS); done

fleet: $(FLEET) ## the tests of tpsgd.fleet, in an environment of its own with Flower and ray
	@.venv-fleet/bin/python -m pytest -q tests/fleet plugins/fleet $(ARGS)

mutants: $(DEV) ## whether the tests find small wrong changes of the core; ten minutes
	@$(PY) tests/mutants/run.py --jobs $(JOBS)

format: $(DEV) ## let ruff repair what it can
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: $(DEV) ## build the site, strictly; then open site/index.html
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "docs: site/index.html"

setup: $(DEV) ## make .venv with the development tools and stop there
	@:

clean: ## remove .venv, caches and everything built; data sets in .data stay
	rm -rf .venv .venv-fleet demo site build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# pip runs again when a version it reads has changed.

define CHECK_PYTHON
@command -v "$(PYTHON)" >/dev/null || { \
  echo "tpsgd needs Python 3.11 or newer, and '$(PYTHON)' is not on the PATH. Name one: make PYTHON=python3.12"; exit 1; }
@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "tpsgd needs Python 3.11 or newer; '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1). Name another: make PYTHON=python3.12"; exit 1; }
endef

$(PY):
	$(CHECK_PYTHON)
	@echo "Setting up .venv. First time: a minute or two, 2 GB (more where pip takes a CUDA build of torch)."
	@"$(PYTHON)" -m venv .venv || { rm -rf .venv; exit 1; }

$(RUN): pyproject.toml plugins/*/pyproject.toml constraints.txt | $(PY)
	@echo "Installing tpsgd into .venv ..."
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e . $(PLUGINS)
	@touch $@

$(DEV): pyproject.toml plugins/*/pyproject.toml constraints.txt | $(PY)
	@echo "Installing tpsgd and its development tools into .venv ..."
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]' $(PLUGINS)
	@touch $(RUN) $@

# Flower needs older versions of typer, rich and protobuf than the other tools.
$(FLEET): pyproject.toml plugins/fleet/pyproject.toml plugins/streams/pyproject.toml constraints-fleet.txt
	$(CHECK_PYTHON)
	@echo "Installing tpsgd and Flower into .venv-fleet: a few minutes, 1.7 GB ..."
	@"$(PYTHON)" -m venv .venv-fleet
	@.venv-fleet/bin/python -m pip install -qq --disable-pip-version-check -c constraints-fleet.txt \
	  -e . -e plugins/adapt -e plugins/streams -e plugins/fleet hypothesis pytest
	@touch $@
