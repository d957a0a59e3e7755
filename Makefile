PYTHON ?= python3
BIN := .venv/bin
# pip compiles the installed modules one after another; all cores take half the time. Some packages have files for other versions of
# Python, which cannot be compiled.
define install
	$(BIN)/pip install --quiet --no-compile --editable $(1)
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
endef

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

# venv writes it last, after pip.
.venv/bin/activate:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Kilolayer needs Python 3.11 or newer; make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

.venv/ready: pyproject.toml | .venv/bin/activate
	$(call install,.)
	touch $@

.venv/ready-dev: pyproject.toml | .venv/bin/activate
	$(call install,'.[dev]')
	touch .venv/ready $@

.venv/ready-docs: pyproject.toml | .venv/bin/activate
	$(call install,'.[docs]')
	touch .venv/ready $@

clean:
	rm -rf .venv site
