# Two commands do everything on a fresh machine with Python 3.11+ and make:
#   make demo   train on embedded digits, top-k beside dense, then on embedded novels, a small language
#               model in rounds of Muon beside dense Muon and dense AdamW
#   make test   lint, format, types and tests, as CI runs them
# and `make docs` builds the documentation.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Of the tests. One more than cores, because many of them wait for processes; more than eight take much memory.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, len(os.sched_getaffinity(0)) + 1))' 2>/dev/null || echo 3)

# Packages are installed without their bytecode; what is compiled when it is imported is kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-library test-workbench lint check docs fuzz faults compat clean

demo: $(VENV)/.ready
	$(BIN)/gradwire train --model lenet5 --method topk --density 0.01 --workers 4 --compare dense --out runs/demo --overwrite
	$(BIN)/gradwire train --model gpt-tiny --recipe muon --workers 4 --compare dense-muon --compare dense-adamw --out runs/demo-language --overwrite

test: lint check

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# All tests in one run: the two halves below share the pool of ranks and fill each other's waits.
check: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

test-library: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --ignore tests/workbench

test-workbench: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal tests/workbench

# The documentation as a site of plain files: open site/index.html. `make check` builds it too.
docs: $(VENV)/.ready
	$(BIN)/python -m mkdocs build --strict

# A million damaged messages into every decoder, three to seven minutes on one core; then 20,000 damaged files
# into the loaders; then 2,000 random sequences of operations, a quarter of them on two real ranks, an hour on two cores.
fuzz: $(VENV)/.ready
	$(BIN)/python -m faults.fuzz_messages --count 1000000
	$(BIN)/python -m faults.fuzz_loaders --count 20000
	$(BIN)/python -m faults.fuzz_sequences --count 2000

# Ranks killed, links cut, disks filled, and a table of what came of it (docs/limits.md). As root all of
# it, otherwise without the cut link and the small disk. KEEP=--keep puts the figures into the docs.
faults: $(VENV)/.ready
	$(BIN)/python -m faults $(KEEP)

# The integration tests under the oldest and the newest torch, and the table of docs/torch-versions.md.
# 6 GB and about six minutes per release, in .compat; VERSIONS="2.12 2.14" for others.
compat: $(VENV)/.ready
	$(BIN)/python -m compat $(VERSIONS)

# --no-compile: Python compiles what is imported, when it is, a small part of 20,000 files.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gradwire needs Python 3.11 or newer; say which with: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .compat runs build site *.egg-info .pytest_cache .ruff_cache .hypothesis
