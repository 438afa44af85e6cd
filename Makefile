# Every target sets up what it needs: `make demo` in a fresh clone is enough.

PYTHON ?= python3
VENV   ?= .venv
# Installed first and pinned, so that no later step swaps it for a CUDA build of several GB. The CPU
# wheel: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
TORCH  ?= torch==2.13.0
# Compiled for that torch, and kept for the next clone.
WHEELS ?= $(HOME)/.cache/pyg_accel/$(TORCH)
# Extra words for the program behind a target: make test ARGS="-k spmm -x"
ARGS   ?=

PY        := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
LIBRARY   := pyg_accel/_C_cpu.abi3.so
SOURCES   := $(wildcard csrc/*.cpp csrc/*.map csrc/cpu/*.cpp csrc/cpu/*.h csrc/cuda/*)
C_FILES   := find csrc -regex '.*\.\(h\|cuh\|cpp\|cu\)' -exec clang-format

# torch looks for ninja on the PATH.
export PATH := $(abspath $(VENV))/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help venv build peers demo test test-all test-gpu test-pyg lint format docs bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

venv: build  ## create .venv with everything, native library included

build: $(LIBRARY)  ## compile the native library if csrc changed

peers: $(VENV)/.peers  ## install torch-sparse; its first compilation takes a quarter of an hour

demo: build  ## run the quickstart
	$(PY) examples/quickstart.py $(ARGS)

# A process for each core and one thread in each; ARGS="-n 0" keeps to one process, as --pdb needs.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n logical --maxprocesses 8 --dist worksteal

test: build  ## run the quick tier of the tests
	$(PYTEST) $(ARGS)

test-all: build  ## run all tests
	$(PYTEST) -m "" $(ARGS)

# With the Python at hand: torch for CUDA, triton, PyG and pytest are all it takes.
test-gpu:  ## run the tests that need a GPU, with $(PYTHON)
	PYTHONPATH="$(CURDIR)" $(PYTHON) -m pytest -m gpu $(ARGS)

test-pyg: build  ## run PyG's own tests under patch(); PYG_SRC=<checkout of PyG>
	@test -d "$(PYG_SRC)" || { echo "set PYG_SRC to a checkout of pytorch_geometric"; exit 1; }
	PYG_SRC="$(abspath $(PYG_SRC))" $(PY) -m pytest tests/pyg_suite -m pyg_suite $(ARGS)

lint: $(INSTALLED)  ## check style and types, change nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict pyg_accel
	$(C_FILES) --dry-run -Werror {} +

format: $(INSTALLED)  ## format the code
	$(PY) -m ruff check --fix --exit-zero .
	$(PY) -m ruff format .
	$(C_FILES) -i {} +

# Without the native library: docstrings are all that is read of the package.
docs: $(VENV)/.docs  ## build the documentation site in build/site; a warning is an error
	$(PY) -m sphinx -W --keep-going -q -b html $(ARGS) -d build/doctrees docs build/site

bench: build  ## measure; writes benchmarks/results
	$(PY) -m benchmarks.run $(ARGS)

clean:  ## remove what was built; the environment stays
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	rm -f pyg_accel/*.so pyg_accel/build_info.json
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c "import ensurepip, venv" 2>/dev/null || { \
	  echo "$(PYTHON) cannot create environments: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Without the library: the rule below compiles it once, visibly and incrementally.
$(INSTALLED): pyproject.toml setup.py | $(PY)
	$(PY) -m pip install "$(TORCH)" "setuptools>=77" ninja
	PYG_ACCEL_NO_EXTENSION=1 $(PY) -m pip install --no-build-isolation -e ".[dev,bench,cost,triton]"
	touch $@

$(VENV)/.peers: $(INSTALLED)
	mkdir -p "$(WHEELS)"
	$(PY) -m pip wheel --no-build-isolation --no-deps --find-links "$(WHEELS)" -w "$(WHEELS)" \
	  torch-scatter torch-sparse
	$(PY) -m pip install --no-index --no-deps --find-links "$(WHEELS)" torch-scatter torch-sparse
	touch $@

$(VENV)/.docs: $(INSTALLED)
	PYG_ACCEL_NO_EXTENSION=1 $(PY) -m pip install --no-build-isolation -e ".[docs]"
	touch $@

# Where there is no compiler this makes no file, says so, and tries again next time.
$(LIBRARY): $(INSTALLED) $(SOURCES)
	$(PY) setup.py -q build_ext --inplace
	@touch -c $@
