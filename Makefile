# The whole user interface of a checkout: make demo, make test. Both set up .venv on the first run.
#
#   PYTHON=python3.12        another interpreter (3.11 or newer)
#   PIP_ARGS="..."           extra arguments for pip, e.g. an index that has CPU builds of torch
#   WORKERS=2                pytest processes
#   ARGS="..."               further arguments for the demo (--page writes a report of its models) or for pytest

PYTHON ?= python3
PIP_ARGS ?=
WORKERS ?= 2
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Each worker has two threads: where these are more than the cores, threads that spin while they wait keep the others
# from what they wait for.
test test-all: export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-all lint
.DELETE_ON_ERROR:

demo: $(STAMP)
	@$(PY) -m demo $(ARGS)

test: lint
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow and not long" $(ARGS)

test-all: lint
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "make: Python 3.11 or newer is needed as $(PYTHON): apt install python3 (or set PYTHON=)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "make: Python's venv module is missing: apt install python3-venv" >&2; exit 1; }
	@command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  { echo "make: a C++ compiler is missing: apt install g++" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo 'make: installing what is needed into $(VENV), a minute or two'
	@$(PY) -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev,demo]'
	@touch $@
