# One word per intent; CI calls the same words. Everything but `setup` runs inside .venv.

PYTHON ?=
BIN := .venv/bin
LATEST := reports/latest
TIERS := $(BIN)/python diff_tests/run_tiers.py

# Neither make's own recursion nor a user's path may decide which modules are tested.
unexport PYTHONPATH

.DEFAULT_GOAL := help
.PHONY: help setup check test interpret compile harness vllm gpu parity report

help:
	@echo 'make setup      create .venv from requirements/cpu.txt and check it'
	@echo 'make check      format, lint, types, import contracts'
	@echo 'make test       every tier of tests, with a count for each'
	@echo 'make interpret  kernels against their references, under the Triton interpreter'
	@echo 'make compile    every kernel compiled for sm_90, without a GPU'
	@echo 'make harness    V1 against itself, and planted faults, through the harness'
	@echo 'make vllm       the other tests that start vLLM'
	@echo 'make gpu        the tests that need a CUDA device (see README.md for its set-up)'
	@echo 'make parity     run all cases, V1 against MRV2, and write the report'
	@echo 'make report     write the report again from the records of the last run'

setup:
	@for python in $(PYTHON) $(if $(PYTHON),,python3.11 python3); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then \
	    exec $$python requirements/setup_env.py; \
	  fi; \
	done; \
	echo "setup: no Python 3.11 found as $(or $(PYTHON),python3.11 or python3);" \
	  "install it, or name it: make setup PYTHON=/path/to/python3.11" >&2; \
	exit 1

check: setup
	@$(TIERS) checks

test: setup
	@$(TIERS)

interpret compile harness vllm: setup
	@$(TIERS) $@

# No set-up here: on a GPU machine name its own environment, `make gpu PYTHON=python`.
gpu:
	@$(or $(PYTHON),$(wildcard $(BIN)/python),python3) diff_tests/run_tiers.py gpu

# The report is written even where a case failed (status 1): that is when it is wanted.
parity: setup
	@status=0; $(BIN)/mrv2-diff run --out $(LATEST) || status=$$?; \
	if [ $$status -lt 2 ]; then \
	  $(BIN)/mrv2-diff report $(LATEST) || status=$$?; \
	fi; \
	exit $$status

report: setup
	@$(BIN)/mrv2-diff report $(LATEST)
