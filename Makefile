# Two commands do everything on a fresh machine with Python 3.11+ and make:
#   make demo   train on the embedded digits, four workers, dense and top-k side by side
#   make test   lint, format, types and tests, as CI runs them
# and `make docs` builds the documentation.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint check docs fuzz clean

demo: $(VENV)/.ready
	$(BIN)/gradwire train --model lenet5 --method topk --density 0.01 --workers 4 --compare dense --out runs/demo --overwrite

test: lint check

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n 2

# The documentation as a site of plain files: open site/index.html. `make check` builds it too.
docs: $(VENV)/.ready
	$(BIN)/python -m mkdocs build --strict

# A million damaged messages into every decoder: ten minutes on one core.
fuzz: $(VENV)/.ready
	$(BIN)/python -m tests.fuzz_messages --count 1000000

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gradwire needs Python 3.11 or newer; say which with: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs build site *.egg-info .pytest_cache .ruff_cache .hypothesis
