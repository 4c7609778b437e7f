# Everything a newcomer types. PYTHON picks the interpreter; TORCH_INDEX, when set, is one more
# wheel index to look in (for instance one that carries CPU builds of torch).
PYTHON ?= python3
TORCH_INDEX ?=
PORT ?= 8000
# Files of tests that run at a time. Each takes up to 4 GB.
WORKERS ?= 3
# An older processor that this one plays in tests: avx2 or sse4.2; tests/processors.py.
ISA ?=
BIN := .venv/bin
AS_OLDER := $(if $(ISA),$(BIN)/python -m tests.processors $(ISA))

# For a machine with a GPU and its own Python: make gpu-check GPU_PYTHON=python3. No network needed.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

# Some machines tell Python to keep no bytecode. Then each of the tests' processes compiles the same
# sources, and collecting the tests takes half as long again.
export PYTHONDONTWRITEBYTECODE :=

# The commit as `ropewalk --version` tells it.
DESCRIBE := git describe --always --dirty --abbrev=12 --exclude='*'

# Cases of gpu-check that run at a time on one GPU. Most of their time is compiling.
GPU_WORKERS ?= 8
GPU_TEST := $(GPU_PYTHON) -m pytest -W default -o addopts=--import-mode=importlib

# The folder that gpu-bench-model writes to.
GPU_OUT ?= build

.PHONY: setup serve lint types kernels-float32 kernels-bfloat16 test test-full test-real test-ray test-arm check fix fuzz soak train gpu-check gpu-bench gpu-bench-model lock image clean

setup: .venv/installed

.venv/installed: pyproject.toml requirements.lock
	@echo "installing into .venv; the first time this takes a few minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		--constraint requirements.lock --editable '.[dev]'
	touch $@

serve: setup  ## the embedded model on http://127.0.0.1:8000
	$(BIN)/ropewalk serve --port $(PORT)

check: lint types

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

kernels-float32 kernels-bfloat16: kernels-%: setup
	OMP_NUM_THREADS=1 $(AS_OLDER) $(BIN)/python -m tests.warm_kernels $*

# The type checker has one thread, so kernels are compiled beside it.
CHECK_AND_COMPILE := $(MAKE) --no-print-directory --jobs 3 check kernels-float32 kernels-bfloat16

PYTEST := $(BIN)/python -m pytest
BY_FILE := --dist loadfile --no-loadscope-reorder
# The tests that another processor could break, as part of CI; ISA=avx2 runs the whole suite.
OLDER_PART := tests/promises/test_any_processor.py tests/model_runtime/layers/test_packed_product.py \
	tests/model_runtime/cpu_kernels/test_simd.py

# The files that have tests to be run alone; collecting the others takes ten seconds.
ALONE = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)

# Those that take a minute or more by nature; `make test-full` runs them, too.
SHORT := and not long

# Three at a time, a thread each, because tests wait for their servers about a third of the time.
test: setup  ## formatter, linter, types, and the suite; ISA=avx2: as an older processor
	$(CHECK_AND_COMPILE)
	OMP_NUM_THREADS=1 $(AS_OLDER) $(PYTEST) -n $(WORKERS) $(BY_FILE) --durations=25 -m "not alone and not ray $(SHORT)"
	$(AS_OLDER) $(PYTEST) --durations=10 -m "alone $(SHORT)" $(ALONE)
	$(if $(ISA),,$(if $(CI),OMP_NUM_THREADS=1 $(BIN)/python -m tests.processors --if-newer avx2 \
		$(PYTEST) -n 2 --dist worksteal $(OLDER_PART)))

test-full:  ## every test, also those marked `long`; before a release
	$(MAKE) test test-real test-ray SHORT="and not (long and real)"

test-real: setup  ## real checkpoints, on all cores
	$(PYTEST) --durations=10 tests/real

# Full length: make test-ray SHORT= REPLICA_ROUNDS=10 REPLICA_SOAK_SECONDS=600 REPLICA_KILL_SECONDS=60
test-ray: setup  ## replicas on a real Ray cluster, and files of the API's tests against two of them
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[dev,ray]'
	OMP_NUM_THREADS=1 $(PYTEST) --durations=10 -m "not alone $(SHORT)" tests/server/ray
	TEST_REPLICAS=2 OMP_NUM_THREADS=1 $(PYTEST) -m "not alone and not real and not long" tests/server/api

# CONTRIBUTING.md says what it needs, and what was seen.
test-arm: setup  ## the kernels, the self-check and one completion on an aarch64 that qemu plays
	$(BIN)/python -m tests.arm_machine $(or $(ARM_FOLDER),build/arm) $(ARM_TESTS)

# Both take their lengths and seeds from the environment; docs/design/reliability.md.
fuzz: setup  ## hostile requests, ten times as many as in the suite
	FUZZ_CASES=$(or $(FUZZ_CASES),40000) $(BIN)/python -m pytest -s \
		tests/server/fuzz/test_raw_fuzz.py tests/server/fuzz/test_openapi_fuzz.py

soak: setup  ## mixed load for ten minutes and slow clients, in the suite for seconds
	SOAK_SECONDS=$(or $(SOAK_SECONDS),600) SLOW_SECONDS=$(or $(SLOW_SECONDS),10) \
		$(BIN)/python -m pytest -s tests/server/load/test_soak.py tests/server/load/test_slow_clients.py

# Stops and goes on at any time; what it makes is compared and shipped by hand: docs/design/embedded-model.md.
train: setup  ## the embedded model again, from Python's own library, into build/embedded_model
	OMP_NUM_THREADS=1 $(BIN)/python -m training

# Each in less than ten minutes; benchmarks/gpu.md says what they need.
# The options of pyproject.toml are strict, and one of its settings is a plugin's that such a machine
# may lack.
gpu-check:  ## the kernels on the GPU against float64, and the embedded model served there
	@$(GPU_PYTHON) -m benchmarks.gpu.needs
	OMP_NUM_THREADS=2 $(GPU_TEST) -n $(GPU_WORKERS) --dist load -m "not alone" \
		tests/gpu tests/model_runtime/attention/test_triton_backend.py \
		tests/model_runtime/attention/test_triton_prefill.py \
		tests/model_runtime/attention/test_triton_ranges.py \
		tests/model_runtime/gpu
	$(GPU_TEST) -m alone tests/gpu

gpu-bench:  ## the attention's speed on the GPU beside the machine's own; tables as Markdown
	@$(GPU_PYTHON) -m benchmarks.gpu.needs
	mkdir -p build
	$(GPU_PYTHON) -m benchmarks.gpu.attention --parts decode,rows,prefill,tuning --record build/gpu.jsonl \
		--commit "$$($(DESCRIBE) 2>/dev/null || echo unknown)"

gpu-bench-model:  ## a whole model there, beside transformers
	@$(GPU_PYTHON) -m benchmarks.gpu.needs
	$(GPU_PYTHON) -m benchmarks.gpu.model --out $(GPU_OUT) \
		--commit "$$($(DESCRIBE) 2>/dev/null || echo unknown)"

fix: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The versions stay those of requirements.lock; tests/locks.py.
lock: setup  ## the hashes of what the image installs, into locks/
	test -x build/uv/bin/uv || ($(PYTHON) -m venv build/uv && build/uv/bin/pip install --quiet 'uv>=0.5')
	$(BIN)/python -m tests.locks build/uv/bin/uv

image:  ## the container image `ropewalk`; docs/guide/operating.md
	docker build $(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX)) \
		$(if $(TORCH_SHA256),--build-arg TORCH_SHA256=$(TORCH_SHA256)) \
		--build-arg SOURCE_COMMIT="$$($(DESCRIBE) 2>/dev/null)" --tag ropewalk .

clean:
	rm -rf .venv build dist *.egg-info
