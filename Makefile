# Needs Python 3.11 or newer, a C++ compiler and make; CMake and Ninja come as Python packages.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CONFIG ?=
# What the installed package is made of: a change to any of it installs again.
SOURCES := pyproject.toml $(shell find gateway cascade exporters CMakeLists.txt -name '__pycache__' -prune -o \
	-type f ! -name '*.so' -print 2>/dev/null)
CXX_SOURCES := $(shell find cascade/ops -name '*.cpp' -o -name '*.h' 2>/dev/null)

.PHONY: serve test sanitize lint bench clean
.DELETE_ON_ERROR:

serve: $(VENV)/.serve-stamp ## Install, fetch the default pair of models, serve on 127.0.0.1:8080
	exec $(BIN)/stepwell serve $(if $(CONFIG),-c $(CONFIG))

test: $(VENV)/.dev-stamp ## Everything: SmolLM2 first, in parallel; then the Qwen pair
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not qwen' tests
	$(BIN)/python -m pytest -m qwen tests

sanitize: $(VENV)/.dev-stamp ## The op library's tests and 10,000 fuzzed calls under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_CXX_COMPILER=$(CXX) \
	  -DSTEPWELL_SANITIZE=ON > /dev/null
	$(BIN)/cmake --build build/sanitize
	STEPWELL_OPS_LIBRARY=build/sanitize/libstepwell_ops.so STEPWELL_FUZZ_CASES=10000 \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	$(BIN)/python -m pytest -n 2 --capture=sys tests/cascade/ops

lint: $(VENV)/.dev-stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES))

bench: $(VENV)/.dev-stamp ## Figures of this machine, one JSON object a benchmark
	$(BIN)/stepwell bench engine --json

clean:
	rm -rf build dist *.egg-info $(VENV)/.serve-stamp $(VENV)/.dev-stamp
	find gateway cascade exporters tests -name '__pycache__' -prune -exec rm -rf {} +
	rm -f cascade/ops/*.so

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Stepwell needs Python 3.11 or newer; $(PYTHON) is older. Say: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve-stamp: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet '.[cpu]'
	touch $@

# Editable, so that tests and tools see the tree as it is; the op library goes beside its sources.
$(VENV)/.dev-stamp: pyproject.toml CMakeLists.txt $(CXX_SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/cmake --install build/wheel --prefix . > /dev/null
	touch $@ $(VENV)/.serve-stamp
