# Every target works from a bare checkout: all it needs is make and a Python.
PYTHON ?= python3
N ?= 1000

PY := .venv/bin/python
STAMP := .venv/.installed
EXTRAS := dev
ifeq ($(shell uname -s),Linux)
EXTRAS := dev,cuda
endif

.PHONY: help setup demo test check fuzz bench clean

help:
	@echo "make setup | demo | test | check | fuzz N=10000 | bench | clean"

setup: $(STAMP)

# Touched last, so that an interrupted install is done again.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: setup
	$(PY) -m epifuse demo

test: setup
	$(PY) -m pytest -n 2

check: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -m pytest -q tests/test_layering.py

fuzz: setup
	$(PY) tests/fuzz.py --n $(N)

bench: setup
	$(PY) benchmarks/cpu_epilogue.py

clean:
	rm -rf .venv build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
