# make run | test | quick | install | soak | gpu      (Python 3.11 or newer and nothing else)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test quick install soak gpu lint clean

install: $(STAMP)

# torch first, and only where none is there yet, so that nothing drags in another build
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,track]"
	touch $@

run: $(STAMP)
	$(BIN)/weft train text -n 2 --steps 40 -- --size 2m

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest tests --ignore tests/gpu

quick: $(STAMP)
	$(BIN)/python -m pytest tests/test_tiny.py tests/pure -m "not slow"

soak: $(STAMP)
	$(BIN)/python -m pytest tests --ignore tests/gpu -m slow
	$(BIN)/python bench/overhead.py

gpu:
	PYTHONPATH=src python3 -m pytest tests/gpu
	PYTHONPATH=src python3 bench/overhead.py --gpu

clean:
	rm -rf $(VENV) runs
