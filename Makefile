# `make demo` and `make test` need nothing but python3 >= 3.11: they install into .venv first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
JOBS   ?= 2

.PHONY: demo test test-all check parity eval bench faults report format clean
.DELETE_ON_ERROR:

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/harness diff --layer 2 --json reports/demo.jsonl --html reports/demo.html

# One thread a worker: JOBS workers of several threads each would only wait for one another.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -q -m "not slow"

# With the few that take long and repeat a check of `test` on longer inputs.
test-all: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -q

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

parity: $(READY)
	$(BIN)/python -m pytest -m parity

eval: $(READY)
	$(BIN)/python -m cases.training.evaluate

bench: $(READY)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.checkpoints

# Fails where a fault is missed; the README's table is `python -m cases.faults`.
faults: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/harness faults --json reports/faults/cpu.jsonl
	$(BIN)/python -m cases.faults

report: $(READY)
	$(BIN)/harness report reports/demo.jsonl --html reports/demo.html

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
