# Each command works from a bare clone: it makes .venv, installs into it, and runs.
#   PYTHON=python3.12 make test         another interpreter for .venv
#   make test ARGS="-k resume"          arguments for pytest, or for the demo
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
INSTALLED := .venv/.installed
# OpenMP threads sleep while they wait for one another. If they spin, the default, the demo's smallest
# steps take half the time on an idle machine, and up to twenty times the time on a busy one.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help demo test lint format clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(INSTALLED)  ## train two small models at every level; the table, build/demo/curves.png
	$(BIN)/python -m examples.demo $(ARGS)

test: $(INSTALLED)  ## run the tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)  ## check format, rules and types
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

format: $(INSTALLED)  ## rewrite the sources as `make lint` wants them
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

clean:  ## remove what the commands made
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache

# A venv that was moved or half made has no working python: it is made again.
$(INSTALLED): pyproject.toml
	$(BIN)/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[demo,test,lint]"
	touch $@
