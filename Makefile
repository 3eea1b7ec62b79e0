# Two commands do everything on a fresh Debian machine: `make demo` and `make test`. `make help` lists the rest.
# Variables: PYTHON=/path/to/python3 (otherwise the newest of 3.13, 3.12, 3.11), PYTEST="-k ring -x".

VENV := .venv
PY := $(VENV)/bin/python
# What the compiled modules are made of; the package's links and build directories are made by setup.py.
ENGINE := $(wildcard pyx/*.pyx pyx/*.pxd pyx/kernels/*.c pyx/kernels/*.h pyx/preload/*.c pyx/preload/*.h)
PYTEST ?=
# The environment's programs come first, as if it were activated.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without its bytecode each of the hundreds of programs that tests start compiles the project anew.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

.PHONY: help build built demo test test-packages lint typecheck unit test-gpu bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       save, restore and compare a few GB on disk and on a real S3 server"
	@echo "make test       lint, types, import direction and every test"
	@echo "make build      the environment and the compiled modules"
	@echo "make lint       ruff, cython-lint, codespell, import direction, mypy"
	@echo "make typecheck  mypy alone"
	@echo "make unit       the tests alone (PYTEST=\"-k ring -x\" passes options on)"
	@echo "make test-gpu   the tests that need a GPU (PYTHON=python3: with that Python as it is, nothing is installed)"
	@echo "make bench      every benchmark; writes bench/RESULTS.md and bench/out/"
	@echo "make clean      remove what the others made"

# The environment, once. `pip` is the machine's own, with its configuration; only one too old for PEP 660
# and PEP 639 is upgraded.
$(VENV)/.created: | .ci/pick-python
	@.ci/system-packages build
	@python=$$(.ci/pick-python) || exit 1; \
	if [ ! -x $(PY) ]; then echo "Making $(VENV) with $$python"; "$$python" -m venv $(VENV); fi
	@$(PY) -c 'import sys; from importlib.metadata import version as v; sys.exit(int(v("pip").split(".")[0]) < 23)' \
	|| $(PY) -m pip install -qq --upgrade "pip>=23.1"
	@touch $@

# The build's own requirements go into the environment too, so that a rebuild needs no network.
$(VENV)/.build-requires: $(VENV)/.created pyproject.toml
	@$(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
	>$(VENV)/build-requires.txt
	@$(PY) -m pip install -qq -r $(VENV)/build-requires.txt
	@touch $@

# Side by side with the next: the modules are compiled by that one, and need only the build's requirements.
$(VENV)/.installed: $(VENV)/.build-requires setup.py
	@echo "Installing ckptpipe and what its tests, linters and benchmarks need"
	@CKPT_ONLY=none $(PY) -m pip install -qq --no-build-isolation -e '.[test,lint,bench]'
	@touch $@

$(VENV)/.built: $(VENV)/.build-requires setup.py $(ENGINE)
	@echo "Compiling the modules"
	@if ! $(PY) setup.py -q build_ext --inplace >$(VENV)/build.log 2>&1; then cat $(VENV)/build.log; exit 1; fi
	@touch $@

# What these have in front of them is made side by side, each line's output in one piece.
SIDE_BY_SIDE = +@$(MAKE) --no-print-directory $(if $(findstring -j,$(MAKEFLAGS)),,-j$$(nproc) -Oline)

build:
	$(SIDE_BY_SIDE) built

built: $(VENV)/.installed $(VENV)/.built
	@:

demo: build
	@$(PY) -m bench.demo

# Nothing of it needs the compiled modules.
lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/cython-lint pyx
	$(VENV)/bin/codespell
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy

typecheck: $(VENV)/.installed
	$(VENV)/bin/mypy

test-packages: $(VENV)/.created
	@.ci/system-packages test

unit:
	$(SIDE_BY_SIDE) built test-packages
	$(UNIT)

test:
	$(SIDE_BY_SIDE) built test-packages lint
	$(UNIT)

UNIT = $(PY) -m pytest -m "not gpu" $$(.ci/test-workers $(PY)) $(PYTEST)

# Only the files with such tests are read, so that what the others import need not be there. With PYTHON=… on the
# command line that Python runs them as it is, with its own PYTHONPATH: nothing is installed, no network is needed;
# it must have pytest, pytest-timeout, setuptools, Cython, crc32c, cuda-python and what ckptpipe needs.
GPU_TESTS = $$(grep -rlE 'mark\.gpu' --include='test_*.py' tests)
ifeq ($(origin PYTHON),command line)
test-gpu:
	@$(PYTHON) setup.py -q build_ext --inplace >build.log 2>&1 || { cat build.log; exit 1; }; rm -f build.log
	@PYTHONPATH="$(CURDIR)/.pkg$(if $(PYTHONPATH),:$(PYTHONPATH))" $(PYTHON) -m pytest -m gpu $(PYTEST) $(GPU_TESTS)
else
test-gpu: build
	@$(PY) -m pytest -m gpu $(PYTEST) $(GPU_TESTS)
endif

bench: build test-packages
	@$(PY) -m bench.run

clean:
	rm -rf $(VENV) .pkg build dist .cache bench/out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf *.egg-info .pkg/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find pyx -name '*.so' -delete
