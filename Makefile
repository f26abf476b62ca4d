# `make` lists the targets. PYTHON, if given, is the interpreter that .venv is made with.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all cuda-check lint format protos goldens clean

BIN := .venv/bin
# For GPUs that are not there. Without these settings XLA looks for a driver and warns of missing tunings.
CUDA_PYTHON := JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=2 .venv-cuda/bin/python
SOURCES := gimbal_jax benchmarks examples research scripts tests

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 12

setup: ## make .venv, if it is not there or out of date
	@scripts/bootstrap $(PYTHON)

demo: setup ## replay a real trace in rounds on two servers: a baseline and gimbal (4 minutes)
	$(BIN)/python -m examples.demo

test: setup ## run the fast tests of every room (5 minutes)
	$(BIN)/python -m pytest -m "not slow and not process and not tools" --hypothesis-profile fast

test-all: setup ## run all tests and list the 25 slowest (12 minutes)
	$(BIN)/python -m pytest --durations 25

cuda-check: ## compile kernels and steps for GPUs that are not there, and check them; see docs/cuda.md
	@scripts/bootstrap --cuda $(PYTHON)
	$(CUDA_PYTHON) -m pytest tests/cuda -n 2
	$(CUDA_PYTHON) -m scripts.kernel_report
	$(CUDA_PYTHON) -m scripts.cuda_check

lint: setup ## ruff and mypy
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: setup ## let ruff format and sort imports
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

protos: setup ## generate the Python of gimbal_jax/protos
	$(BIN)/python scripts/make_protos.py

goldens: ## rewrite tests/goldens; GOLDENS_PYTHON is a Python with torch and transformers
	$(or $(GOLDENS_PYTHON),$(error set GOLDENS_PYTHON to a Python with torch and transformers)) scripts/make_goldens.py tests/goldens

clean: ## remove .venv, caches and out/
	rm -rf .venv .venv-cuda out build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
