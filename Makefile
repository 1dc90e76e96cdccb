# Every target works from a bare checkout: all it needs is make and a Python.
PYTHON ?= python3
N ?= 1000

PY := .venv/bin/python
VENV := .venv/pyvenv.cfg
STAMP := .venv/.installed
# Bytecode is kept whatever the environment says: the tests start many processes that import the package.
export PYTHONDONTWRITEBYTECODE :=
EXTRAS := dev
ifeq ($(shell uname -s),Linux)
EXTRAS := dev,cuda
endif

# The oldest CuTe DSL that pyproject.toml promises, beside the one that is used; only tests/test_oldest_dsl.py sees it.
OLDEST := $(shell sed -n 's/.*nvidia-cutlass-dsl\[cu13\]>=\([0-9.]*\).*/\1/p' pyproject.toml)
OLDEST_PARTS := $(foreach part,-libs-core -libs-base -libs-cu13,nvidia-cutlass-dsl$(part)==$(OLDEST))
ifeq ($(shell uname -s),Linux)
OLDEST_STAMP := .venv/oldest/.installed
endif

SELDOM_IMPORTED := tests|testing|models|networkx|narwhals|torchgen|onnx|ao|joblib|scipy|sklearn|pip|setuptools|mypyc?|fontTools|pygments|physics|matplotlib

.DELETE_ON_ERROR:  # an environment that was half made is made again

.PHONY: help setup demo test sweep oldest check fuzz bench site clean

help:
	@echo "make setup | demo | test | sweep | oldest | check | fuzz N=10000 | bench | site | clean"

setup: $(STAMP)

# With the newest pip: the one that comes with Python 3.11 takes 87 s for what pip 26.3 does in 51.
$(VENV):
	$(PYTHON) -m venv --upgrade-deps .venv

# Touched last, so that an interrupted install is done again. pip would compile on one processor; compileall takes all,
# and fails for templates that are no Python. Half of the text is left out: a test imports few modules of it, if any.
$(STAMP): $(VENV) pyproject.toml constraints.txt
	$(PY) -m pip install --quiet --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@$(PY) -m compileall -qq -j 0 -x "/($(SELDOM_IMPORTED))/" .venv/lib || true
	@touch $@

demo: setup
	$(PY) -m epifuse demo

test: setup oldest
	$(PY) -m pytest -n 2 --dist worksteal

sweep: setup oldest
	$(PY) -m pytest -n 2 --dist worksteal --whole-sweeps

oldest: $(OLDEST_STAMP)

.venv/oldest/.installed: $(VENV) pyproject.toml
	$(PY) -m pip install --quiet --no-deps --upgrade --target .venv/oldest nvidia-cutlass-dsl==$(OLDEST) $(OLDEST_PARTS)
	@touch $@

check: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -m pytest -q tests/test_layering.py

fuzz: setup
	$(PY) tests/fuzz.py --n $(N)

bench: setup
	$(PY) benchmarks/cpu_epilogue.py

site: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean:
	rm -rf .venv build dist site src/*.egg-info .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
