# make run | test | quick | install | docs | soak | gpu | lint | clean        needs Python 3.11 or newer and nothing else
PYTHON ?= python3
TORCH := torch==2.13.0
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: run test quick install docs soak gpu lint clean chromium

test quick soak: export CUDA_VISIBLE_DEVICES =  # these suites are of the CPU, on a machine with a GPU as well

# which strategy to use for a GPT of 10 M parameters on four hosts at 1 Gbit/s, a job that distributing makes faster;
# about three minutes. Plain processes replace emulated hosts where the system allows no network namespaces.
run: $(STAMP)
	@echo "Training on four emulated hosts under five strategies. Four hosts would share this machine's processors, so"
	@echo "each sleeps for as long as one host alone computes (--compute sleep); what they send is real."
	$(BIN)/weft compare text --hosts 4 --bandwidth 1gbit --compute sleep --steps 20 --seeds 1 --links auto -- --batch 2

install: $(STAMP)

# torch first, and only where none is there yet, so that nothing drags in another build or replaces one
$(STAMP): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,report,track]"
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the report is looked at in a real browser
chromium:
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium)

# two at a time: starting and ending runs leaves cores idle; alone what measures links
test: lint chromium
	$(BIN)/python -m pytest tests --ignore tests/gpu --ignore tests/net --numprocesses 2 --dist loadfile
	$(BIN)/python -m pytest tests/net

quick: $(STAMP)
	$(BIN)/python -m pytest tests/test_tiny.py tests/pure --numprocesses 2 --dist loadfile

# the generated pages, and all of the documentation as a site in build/docs; nothing is fetched while it is built
docs: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/python docs/generate.py
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/docs

soak: $(STAMP)
	$(BIN)/python -m pytest tests --ignore tests/gpu -m slow
	FUZZ_FRAMES=1000000 $(BIN)/python -m pytest tests/process/test_strangers.py tests/process/test_shard_service.py \
		-k "strangers or liars or garbage or nonsense"
	FUZZ_FRAMES=1000000 WEFT_SANITIZE=1 ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD=$$($${CXX:-c++} -print-file-name=libasan.so) \
		$(BIN)/python -m pytest -s tests/pure/test_fuzz_wire.py -m "slow or not slow"

gpu:
	PYTHONPATH=src python3 -m pytest tests/gpu
	PYTHONPATH=src python3 bench/overhead.py --gpu

clean:
	rm -rf .venv runs build
