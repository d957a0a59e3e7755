PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test test-all lint docs clean

quickstart: .venv/ready
	if [ -e runs/quickstart/config.toml ]; then $(BIN)/kilolayer train --resume runs/quickstart; else $(BIN)/kilolayer train; fi

test: .venv/ready-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: .venv/ready-dev .venv/ready-docs
	$(BIN)/python -m pytest -n 2

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

# The theme's own news about its successor is no warning about these pages.
docs: .venv/ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the documentation: site/index.html"

.venv/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Kilolayer needs Python 3.11 or newer; make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/ready-dev: .venv/ready
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

.venv/ready-docs: .venv/ready
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv site
