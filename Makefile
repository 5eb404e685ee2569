# make demo: sets everything up and runs the main job.
# make test: sets everything up and tests.   make test-slow: the slower tests.   Both are what CI runs.
# make soak [SOAK_MINUTES=M]: long random programs, repeated faults, and tests that compare times.
# make test TESTS=tests/comm: one folder of them; also for test-slow and soak.
# TEST_WORKERS=N: so many test files at a time, 2 unless told; 0: one test after the other.
# make bench: compares with gloo, DeepSpeed and MPI.   make benchmarks: builds the C++ programs.
# make cuda: builds the library for GPUs (needs nvcc).
# make gpu-check [PART=build|test|bench]: builds, tests and measures on a GPU, with PYTHON as it is.
# make campaign [KINDS=NAME...]: injects faults by seed, thousands of cases: tests/fuzz/campaign.py.
# make faults [FAULTS=NAME...]: plants known faults one at a time; the fast tests must find them.
# make lint, make format, make clean.
#
# PYTHON chooses the interpreter of the venv. Nothing is installed outside .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch from PyPI without CUDA: this very version has a CPU build there.
TORCH := torch==2.13.0
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# With the venv's own cmake and ninja, into one build folder, so that only the first one compiles.
INSTALL := PATH="$(abspath $(BIN)):$$PATH" PYCOLL_BUILD_DIR=build/cmake $(PIP) --no-build-isolation

SOAK_MINUTES ?= 10
TEST_WORKERS ?= 2
TESTS ?= tests
START := $(shell date +%s)

# A file of tests stays with one worker: its ranks are started once.
WORKERS = --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder \
          --max-worker-restart 0

# $(call pytest,markers,options): runs the tests, and prints the seconds of set-up and of the tests.
define pytest
@begin=$$(date +%s); \
$(BIN)/python -m pytest -m "$(1)" $(2) $(TESTS); status=$$?; \
echo "make $@: $$((begin - $(START))) s of set-up"; \
echo "make $@: $$(($$(date +%s) - begin)) s of tests"; \
exit $$status
endef

.PHONY: cuda gpu-check demo test test-slow test-programs soak campaign faults bench benchmarks lint format clean build

demo: $(VENV)/demo build
	$(BIN)/python examples/demo.py --out out

# Tests fork their ranks; with large pages a fork copies half as much.
test: export GLIBC_TUNABLES = glibc.malloc.hugetlb=1
test: $(VENV)/test test-programs
	$(call pytest,not slow and not soak and not timing,$(WORKERS))

test-slow: $(VENV)/test $(VENV)/frameworks build
	$(call pytest,slow and not soak and not timing,$(WORKERS))

soak: export PYCOLL_SOAK_MINUTES = $(SOAK_MINUTES)
soak: $(VENV)/test $(VENV)/frameworks build
	$(call pytest,soak or timing,-s)

campaign: $(VENV)/test build
	$(BIN)/python tests/fuzz/campaign.py $(KINDS)

faults: $(VENV)/test build
	$(BIN)/python tests/faults/run.py $(FAULTS)

bench: $(VENV)/demo build
	@$(PIP) ml_dtypes  # bf16 for NumPy
	$(BIN)/python benchmarks/compare.py

# C++ programs that tests run; a test that needs one builds it where this was not called.
test-programs: build
	@PATH="$(abspath $(BIN)):$$PATH" cmake -DPYCOLL_TESTS=ON -DPYCOLL_BENCHMARKS=ON build/cmake > /dev/null
	@PATH="$(abspath $(BIN)):$$PATH" cmake --build build/cmake \
	  --target device_threads checks fixed_program_check benchmarks

# all_reduce_perf and its like, into build/cmake/benchmarks.
benchmarks: build
	@PATH="$(abspath $(BIN)):$$PATH" cmake -DPYCOLL_BENCHMARKS=ON build/cmake > /dev/null
	@PATH="$(abspath $(BIN)):$$PATH" cmake --build build/cmake --target benchmarks

# For sm_80, sm_90a, sm_100a and, as PTX, all later ones; PYCOLL_CUDA_ARCHITECTURES names others.
cuda: $(VENV)/installed
	@PATH="$(abspath $(BIN)):$$PATH" PYCOLL_BUILD_DIR=build/cmake PYCOLL_CUDA=on \
	  $(BIN)/python setup.py --quiet build_ext --inplace

# Sets nothing up and needs no network. Status 2: the machine lacks something, and it says what.
gpu-check:
	@$(PYTHON) benchmarks/gpu_check.py --part $(or $(PART),all) $(if $(OUT),--out $(OUT))

lint: $(VENV)/lint
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md docs csrc pycoll tests benchmarks examples
	git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/lint
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i

clean:
	rm -rf build .venv .bench out pycoll/_core*.so pycoll/_cuda.so pycoll/torch/_shim.* *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up, each step once -----------------------------------------------------------------------

# The editable install configures CMake in build/cmake; later builds are incremental.
build: $(VENV)/installed
	@PATH="$(abspath $(BIN)):$$PATH" PYCOLL_BUILD_DIR=build/cmake \
	  $(BIN)/python setup.py --quiet build_ext --inplace

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: on Debian, apt install python3-venv"; exit 1; }

$(VENV)/installed: pyproject.toml setup.py | $(VENV)/bin/python
	@echo "Setting up $(VENV) and building pycoll (1 to 3 minutes) ..."
	@$(PIP) "setuptools>=77" "pybind11>=2.13" "cmake>=3.24" ninja
	@$(PIP) "mpich>=5" || echo "No wheel of MPICH for this machine: links over MPI need its mpi_abi.h"
	@$(INSTALL) -e .
	@touch $@

$(VENV)/demo: $(VENV)/installed
	@echo "Installing torch (CPU build), scikit-learn and matplotlib ..."
	@$(PIP) $(TORCH)
	@$(INSTALL) -e ".[demo]"
	@touch $@

$(VENV)/test: $(VENV)/demo
	@echo "Installing the test tools ..."
	@$(INSTALL) -e ".[demo,test]"
	@touch $@

$(VENV)/frameworks: $(VENV)/test
	@echo "Installing accelerate, Lightning, Ray and transformers ..."
	@$(INSTALL) -e ".[frameworks]"
	@touch $@

$(VENV)/lint: $(VENV)/installed
	@$(INSTALL) -e ".[lint]"
	@touch $@
