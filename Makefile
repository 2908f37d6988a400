# The commands of the project. Each makes .venv first, or again after a change that needs it.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --quiet --disable-pip-version-check
CXX_SOURCES := CMakeLists.txt $(shell find ffi -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')

.PHONY: train test lint venv clean

train: venv
	$(BIN)/python -m train tiny

# Two workers, each with one NumPy thread. Tests that follow one another share compiled programs, so
# a worker takes a contiguous range of them and steals only at the end.
test: venv
	build/editable/numerics_test
	OPENBLAS_NUM_THREADS=1 $(BIN)/pytest --numprocesses=2 --dist=worksteal

lint: .venv/lint-installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/clang-format --dry-run --Werror $(filter ffi/%,$(CXX_SOURCES))

venv: .venv/installed

# Builds the compiled module too, into jaxfp4/, and the C++ test, into build/editable/.
.venv/installed: .venv/made pyproject.toml $(CXX_SOURCES)
	@echo 'Installing into .venv and compiling; the first time takes minutes.'
	$(PIP) install --editable '.[train,test]'
	touch $@

# Asks for an extra of what is installed already: the linters alone are added.
.venv/lint-installed: .venv/installed
	$(PIP) install 'jaxfp4[lint]'
	touch $@

.venv/made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv .venv
	touch $@

clean:
	rm -rf .venv build jaxfp4/_custom_calls*.so
