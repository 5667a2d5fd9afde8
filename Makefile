# Every verb works from a clean clone with Python 3.11, and again when repeated.
# Nothing is imported from the working directory by accident: the folders
# `worker` and `kernels` are source roots, not packages.
export PYTHONSAFEPATH := 1

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq
LOCKED := -c constraints.txt
EXTRAS := cli,server,worker,ucx12

# Stamps: an environment is made anew only when what it was made from changed.
LOCK       := pyproject.toml constraints.txt
SETUP_DONE := $(VENV)/.setup-done
TEST_DONE  := $(VENV)/.test-done

PROTOS := $(wildcard protos/loader_service/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long lint format generate bench constraints clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(SETUP_DONE): $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(LOCKED) --upgrade pip
	$(PIP) install $(LOCKED) --group build
	$(PIP) install $(LOCKED) --no-build-isolation -e '.[$(EXTRAS)]'
	$(PIP) install $(LOCKED) --no-deps --group demo
	@touch $@

$(TEST_DONE): $(SETUP_DONE)
	$(PIP) install $(LOCKED) --group test
	@touch $@

setup: $(SETUP_DONE) ## install the service into .venv

demo: setup ## load a small real model on two local workers
	$(BIN)/python -m loader_service.demo

test: $(TEST_DONE) ## run the suite, style and type checks included
	$(BIN)/python -m pytest -q --durations=15 -m 'not slow'

test-long: $(TEST_DONE) ## run the suite with the tests that take minutes
	$(BIN)/python -m pytest -q --durations=15 -o timeout=900 -o faulthandler_timeout=880

lint: $(TEST_DONE) ## check style, types, import rules and protos only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint protos

format: $(TEST_DONE) ## rewrite the code in the project's style
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format

generate: $(TEST_DONE) ## write loader_service/v1 from protos/, and the sync client
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos \
	    --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. $(PROTOS)
	$(BIN)/python loader_service/client/make_sync.py
	$(BIN)/ruff check -q --select I --fix loader_service/client
	$(BIN)/ruff format -q loader_service/client

bench: $(TEST_DONE) ## measure a load, and the control plane under watchers, on this machine
	$(BIN)/python tests/bench/load_bench.py
	$(BIN)/python tests/bench/control_plane_bench.py

constraints: ## resolve the newest versions and write constraints.txt
	rm -rf build/resolve
	$(PYTHON) -m venv build/resolve
	build/resolve/bin/python -m pip install -qq --upgrade pip
	build/resolve/bin/python -m pip install -qq '.[$(EXTRAS)]' --group test
	build/resolve/bin/python -m pip install -qq --no-deps --group demo
	build/resolve/bin/python -m pip freeze --all --exclude loader-service \
	    | sed -nE 's/^([A-Za-z0-9._-]+==[^+ ]+).*$$/\1/p' > constraints.txt

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find loader_service worker kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +
