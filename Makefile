# jaxcoll: everything from a fresh clone. Needs Python >= 3.11 with venv, a C++17 compiler and make; the rest comes by pip.
#
#   make demo                      eight emulated hosts train a Flax model, strangers congest one, the tuner reacts
#   make test                      the tests;  TESTS=--full  the whole products too;  PYTHON=python3.12  with another interpreter
#   make lint                      formatters, linters, type checker, layer rules
#   make asan, make tsan           the native tests, the GPU executor and a multi-process run under sanitizers
#   make bench                     the collectives' tables in BENCHMARKS.md
#   make wheel                     dist/*.whl;    make clean, make distclean

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
# Another interpreter gets an environment of its own; the default one is the plain .venv that people look for.
ifeq ($(PYTHON),python3)
VENV := .venv
else
VENV := .venv-$(notdir $(PYTHON))
endif
BIN := $(VENV)/bin
BUILD := build/$(notdir $(VENV))
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
JOBS ?= $(shell nproc)
# Rows of the benchmark: make bench ROWS="chain inproc"
ROWS ?=
# Options of the demo: make demo DEMO=--plain  trains on eight processes of this machine, jax.lax against jaxcoll
DEMO ?=
# Where the library goes. Each file is put there by rename: processes that run keep what they have mapped.
NATIVE ?= jaxcoll/_native
# The pytest arguments: make test TESTS="tests/bench -k sizes"
TESTS ?=
# Tests that keep one core busy each run side by side; the others fill all cores, or look at the clock.
SIDE_BY_SIDE := $(patsubst %,tests/%,bench gpu native ops repo schedule sim synth telemetry topology tuner)

# How far clang's analyzer follows each function. Its own 225000 takes three times as long and finds no more here.
NODES ?= 50000

.PHONY: help
help:
	@sed -n '3,9s/^# *//p' Makefile

# ---------------------------------------------------------------- environment

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11)' 2>/dev/null || \
	  { echo "$(PYTHON) is missing or older than 3.11; name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "There is no C++ compiler; on Debian and Ubuntu: apt install g++"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install "scikit-build-core>=0.10" "cmake>=3.22" ninja
	@touch $@

# An editable install without the native part, which `make native` builds into the source tree: changing either
# language costs only its own rebuild.
EDITABLE := $(PIP) install --no-build-isolation -C wheel.cmake=false -C editable.mode=inplace --editable

$(VENV)/.base: $(VENV)/.made pyproject.toml
	$(EDITABLE) .
	@touch $@

$(VENV)/.examples $(VENV)/.test $(VENV)/.dev: $(VENV)/.%: $(VENV)/.base
	$(EDITABLE) ".[$*]"
	@touch $@

# ---------------------------------------------------------------- native library

# $(1): build folder, $(2): CMake options. The interpreter tells CMake where jaxlib keeps the FFI headers; a build folder
# that an environment has left behind would keep those of the old one.
CONFIGURE = $(BIN)/cmake -S ffi -B $(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	-DPython3_EXECUTABLE=$(abspath $(BIN)/python) -DXLA_FFI_INCLUDE_DIR= $(2)

$(BUILD)/.configured: $(VENV)/.base ffi/CMakeLists.txt
	$(call CONFIGURE,$(BUILD),-DCMAKE_BUILD_TYPE=Release -DJAXCOLL_TESTS=ON)
	@touch $@

.PHONY: native
native: $(BUILD)/.configured
	$(BIN)/cmake --build $(BUILD) -j $(JOBS)
	@$(BIN)/cmake --install $(BUILD) --prefix $(BUILD)/installed >/dev/null
	@mkdir -p $(NATIVE)
	@cd $(BUILD)/installed/_native && for f in *; do cmp -s $$f $(abspath $(NATIVE))/$$f || \
	  { cp $$f $(abspath $(NATIVE))/.$$f.new && mv -f $(abspath $(NATIVE))/.$$f.new $(abspath $(NATIVE))/$$f; } || exit 1; done

# ---------------------------------------------------------------- what people run

.PHONY: demo test bench lint format asan tsan wheel
demo: $(VENV)/.examples native
	$(BIN)/python examples/demo.py $(DEMO)

test: $(VENV)/.test native
	$(call ctest,$(BUILD),)
	$(if $(TESTS),,$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 $(SIDE_BY_SIDE))
	$(BIN)/python -m pytest $(or $(TESTS),$(SIDE_BY_SIDE:%=--ignore=%))

bench: $(VENV)/.base native
	@$(BIN)/python -c 'import mpi4py' 2>/dev/null || $(PIP) install mpi4py || true
	$(BIN)/python -m jaxcoll.bench.suite $(or $(ROWS),--write BENCHMARKS.md)

lint: $(VENV)/.dev native
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	git ls-files 'ffi/*.cc' 'ffi/*.h' 'ffi/*.inc' | xargs -r $(BIN)/clang-format --dry-run --Werror
	git ls-files 'ffi/src/*.cc' | xargs -r -n 1 -P $(JOBS) $(BIN)/clang-tidy --quiet -p $(BUILD) $(addprefix --extra-arg=,-Xclang -analyzer-config -Xclang max-nodes=$(NODES))

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	git ls-files 'ffi/*.cc' 'ffi/*.h' 'ffi/*.inc' | xargs -r $(BIN)/clang-format -i

# $(1): build folder, $(2): environment. A build without C++ tests has no list of them.
ctest = if [ -f $(1)/CTestTestfile.cmake ]; then cd $(1) && $(2) $(abspath $(BIN))/ctest --output-on-failure; fi

# Of tests/gpu: the executor over the stand-in, which is built with the sanitizers too. Kernels are compiled, not run, and the rest starts
# other programs.
SANITIZED_GPU := $(patsubst %,tests/gpu/test_%.py,executor failures hosts path processes world)

# $(1): CMake's list of sanitizers, $(2): the runtime to preload into Python, $(3): options of that runtime. libstdc++ is
# preloaded as well: the runtime looks for its throw function at start, and Python alone doesn't bring it. What a runtime
# writes before it ends the process would be lost in pytest's capture of file descriptors.
define sanitized
	$(call CONFIGURE,build/$@,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DJAXCOLL_TESTS=ON -DJAXCOLL_SANITIZE=$(1))
	$(BIN)/cmake --build build/$@ -j $(JOBS)
	$(call ctest,build/$@,$(3))
	$(3) LD_PRELOAD="$$($${CXX:-c++} -print-file-name=$(2)) $$($${CXX:-c++} -print-file-name=libstdc++.so)" JAXCOLL_LIBRARY=$(CURDIR)/build/$@/libjaxcoll.so \
	  JAXCOLL_TEST_SANITIZER=$@ $(BIN)/python -m pytest --capture=sys tests/native tests/sanitize $(SANITIZED_GPU) $(TESTS)
endef

comma := ,

asan: $(VENV)/.test
	$(call sanitized,address$(comma)undefined,libasan.so,ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=halt_on_error=1)

# intercept_tls_get_addr: off, since the runtime takes thread-local storage that lies 16 bytes into a page for that of an old glibc, reads a
# size from before it, and dies of it ("failed to allocate 0xfff... bytes"): two runs of three of the GPU tests, none of six without it.
tsan: $(VENV)/.test
	$(call sanitized,thread,libtsan.so,TSAN_OPTIONS=halt_on_error=1:intercept_tls_get_addr=0:ignore_noninstrumented_modules=1:suppressions=$(CURDIR)/ffi/tests/tsan.supp)

wheel: $(VENV)/.made
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

.PHONY: clean distclean
clean:
	rm -rf build dist jaxcoll/_native
distclean: clean
	rm -rf .venv .venv-*
