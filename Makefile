# Every target sets up what it needs in .venv and then runs. PYTHON and TORCH can be set from outside.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test lint eval ablation bench test-gpu bench-2gpu clean

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -e ".[dev]"
	touch $(READY)

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Accuracy of the trained miniature at five TP x PCP splits on the CPU; fails if a target is missed.
eval: setup
	$(BIN)/python -m training.evaluate

# The same with one part broken at a time.
ablation: setup
	$(BIN)/python -m training.ablation

# GPU targets want the torch that was measured: make TORCH=torch==2.11.0 test-gpu, in a clone without a .venv.
$(VENV)/.ready-gpu: $(READY)
	$(BIN)/pip install --quiet -e ".[dev,cuda]"
	$(BIN)/pip install --quiet --no-deps sgl-flash-mla==1.0.0
	touch $@

test-gpu: $(VENV)/.ready-gpu
	$(BIN)/python -m pytest tests/gpu

# Two GPUs of one machine: correctness, collectives, and prefill at TP2/PCP1 against TP1/PCP2, in one time box.
bench-2gpu: $(VENV)/.ready-gpu
	$(BIN)/python benchmarks/two_gpus.py --out build/bench-2gpu

# A small sweep over three splits on the CPU; the report is written to bench-results/.
bench: setup
	rm -rf bench-results
	$(BIN)/paraflash checkpoint synth build/bench-model --force
	$(BIN)/paraflash bench sweep build/bench-model --topologies tp2 pcp2 tp2pcp2 --input-lens 64 256 \
		--concurrencies 1 4 --output-len 4 --waves 4 --server-args="--device cpu" --out bench-results

clean:
	rm -rf $(VENV) build dist *.egg-info
