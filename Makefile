# Every target sets up what it needs in .venv; nothing has to be installed by hand beforehand except
# Python 3.11 or newer. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# torch goes in first and at its exact pin: a looser requirement can resolve to a newer build and fetch
# gigabytes of CUDA packages.
TORCH := $(shell grep -m1 '^torch==' constraints.txt)
PYTEST_ARGS ?=
# Some images set it. Every program would then compile the package anew, and pytest rewrite all tests: a third more.
export PYTHONDONTWRITEBYTECODE :=
# Processes of pytest: two for each of two cores, since tests also wait. One that has run out of tests takes half of
# another's rest.
JOBS ?= 4
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
# Lint runs beside the tests, and what it says comes after them: red if either is.
BESIDE_LINT = @$(MAKE) --no-print-directory lint >$(VENV)/lint.log 2>&1 & lint=$$!; \
	run() { echo "$$*"; "$$@"; tests=$$?; wait $$lint; lint=$$?; cat $(VENV)/lint.log; exit $$((tests | lint)); }; run
# Tests of what people run and read beside the loader: benchmarks, commands, pages, examples. CI runs them too.
PROGRAMS := tests/bench tests/cli tests/examples tests/project/test_blocks_of_pages.py tests/project/test_site.py \
	tests/profiling/test_profile_commands.py tests/monitor/test_start_hook.py
WITHOUT_PROGRAMS := $(PROGRAMS:%=--ignore %)
DEMO_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=
MATRIX_ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo docs pictures test test-fast test-all test-bench test-integrations test-matrix lint bench gpu soak clean

# The fast set leaves out what starts interpreters (spawned workers, programs, the command line, the benchmarks), and
# what waits for deaths, timeouts and the clock.
SLOW := bench cli robustness order serving workers \
	loader/test_endings.py loader/test_lifecycle.py loader/test_statistics_table.py parity/test_other_torch.py \
	slots/test_limits.py slots/test_mapping.py slots/test_missing_platform.py store/test_mapped_files.py
FAST := -k 'not spawn and not forkserver and not program and not interpreter' \
	$(foreach path,$(SLOW),--ignore tests/$(path))

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.stamp-demo ## Run the demonstration (DEMO_ARGS=...)
	$(BIN)/python -m shmloader demo $(DEMO_ARGS)

# The source is laid out as the checkout is, so that links between pages hold in both. A link that leads nowhere fails.
docs: $(VENV)/.stamp-docs ## Build the site in build/site, with its links checked
	rm -rf build/site-source build/site
	mkdir -p build/site-source/benchmarks
	cp -r README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs examples build/site-source/
	cp benchmarks/*.md benchmarks/*.py build/site-source/benchmarks/
	$(BIN)/python -m benchmarks.pictures build/site-source/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: $(VENV)/.stamp-docs ## Draw the pictures of docs/ anew: what commands show and draw
	$(BIN)/python -m benchmarks.pictures docs

test: $(VENV)/.stamp-test ## Lint, check types, run the tests of the loader: every claim, a sample of random runs (PYTEST_ARGS=...)
	$(BESIDE_LINT) $(PYTEST) $(WITHOUT_PROGRAMS) $(PYTEST_ARGS)

test-fast: $(VENV)/.stamp-test ## The same without tests that start interpreters
	$(BESIDE_LINT) $(PYTEST) $(FAST) $(PYTEST_ARGS)

test-bench: $(VENV)/.stamp-test ## The tests of benchmarks, commands, pages and examples
	$(PYTEST) $(PROGRAMS) $(PYTEST_ARGS)

test-all: $(VENV)/.stamp-test ## All tests, with all random runs and the long ones: programs killed, confined, interrupted
	$(BESIDE_LINT) env SHMLOADER_LONG=1 $(PYTEST) $(PYTEST_ARGS)

# An environment of its own, so that `make test` needs none of these libraries.
test-integrations: ## The tests with accelerate, Trainer, Lightning, ignite, PyG, MONAI and others
	$(MAKE) VENV=.venv-integrations .venv-integrations/.stamp-integrations
	.venv-integrations/bin/python -m pytest tests/frameworks $(PYTEST_ARGS)

test-matrix: $(VENV)/.stamp-matrix ## The tests of the installed wheel with every version claimed (MATRIX_ARGS=...)
	$(BIN)/python tests/matrix/run.py $(MATRIX_ARGS)

lint: $(VENV)/.stamp-test ## Lint, check formatting, check types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.stamp-bench ## Compare with all peers on all work, for an hour or two (BENCH_ARGS=...)
	$(BIN)/python -m shmloader bench $(BENCH_ARGS)

# pip takes torch's CUDA build where the package index has it first, as PyPI does for Linux.
gpu: $(VENV)/.stamp-test $(VENV)/.stamp-bench ## On a machine with a GPU: its tests and benchmarks (BENCH_ARGS='--workers 15')
	$(BIN)/python -m shmloader doctor; doctor=$$?; \
	$(BIN)/python -m pytest tests/device -m gpu $(PYTEST_ARGS); tests=$$?; \
	$(BIN)/python -m benchmarks.device $(BENCH_ARGS); exit $$((doctor | tests | $$?))

soak: $(VENV)/.stamp-test ## Kill, break off and hold for 30 minutes (SOAK_ARGS=...)
	PYTHONPATH=tests $(BIN)/python -m robustness.soak --minutes 30 $(SOAK_ARGS)

clean: ## Remove the environment, builds and caches
	rm -rf $(VENV) .venv-integrations .matrix build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per extra, inside the environment so that both go together. setuptools comes with torch, so
# the build needs no isolated environment, and the constraints hold for it too.
$(VENV)/.stamp-%: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	$(PIP) install --disable-pip-version-check -c constraints.txt "$(TORCH)" setuptools
	$(PIP) install --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[$*]'
	@touch $@

# An environment that works is kept, whoever made it; a broken or half-made one is made anew.
$(VENV)/.stamp-venv:
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "shmloader needs Python 3.11 or newer, and '$(PYTHON)' is" \
	      "$$($(PYTHON) --version 2>&1 || true). Name another: make PYTHON=/path/to/python3.11"; \
	    exit 1; }; \
	  $(PYTHON) -c 'import ensurepip, venv' || { \
	    echo "'$(PYTHON)' cannot make environments: install its venv package (python3-venv)"; \
	    exit 1; }; \
	  $(PYTHON) -m venv --clear $(VENV); } >&2
	@touch $@
