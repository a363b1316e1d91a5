# Each target sets up what it needs first: nothing but Python 3.11 to 3.14 has to be there.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup peers ablation test test-slow test-slurm format gpu lock tables reference

# Cores for the workflow. Timed jobs run one at a time whatever this is.
CORES ?= 1
# More arguments for snakemake: make ablation ARGS='--configfile my.yaml'
ARGS ?=
# Some of the checks only: make test CHECKS='mypy wheel'. The longest are the first.
CHECKS ?= tests-suite tests-machine tests-workflow tests-engine sanitizers mypy wheel snakemake-lint ruff ruff-format snakefmt
# Folder that `make gpu` writes rows and traces to.
OUT ?= results/gpu
# What `make reference` runs: all but the check against the rows that it is to replace.
EXPERIMENTS := ablation speed memory sweep schedules advice timeline transparency
# What `make setup` installs: workflow, models (workflow and published networks), dev (models and the checks) or peers.
LAYER ?= models
# The Python that .venv is made with; empty: the first suitable one in PATH.
PYTHON ?=
# Another PyTorch than the pinned one, in an environment of its own: make test TORCH=2.14.1
TORCH ?=
export PYTHON TORCH

# uv, pip and Snakemake keep caches in the home; where that cannot be written, they are in the checkout.
ifndef XDG_CACHE_HOME
ifneq ($(shell mkdir -p "$$HOME/.cache" 2> /dev/null && test -w "$$HOME/.cache" && echo writable),writable)
export XDG_CACHE_HOME := $(CURDIR)/.cache
endif
endif

BIN := $(CURDIR)/.venv$(if $(TORCH),-torch-$(TORCH))/bin
# Adds to .venv what a target needs and is not there; a line of its recipe names the layer.
SETUP := @scripts/setup.sh --quiet
# The pinned tools run, whatever stands first in PATH.
TOOL := PATH="$(BIN):$$PATH" $(BIN)/python -m
# The output of each check in one piece, where make can do that.
WHOLE := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' Makefile

setup: ## make .venv with the pinned packages that every target of the workflow needs; LAYER=dev: all
	@scripts/setup.sh $(LAYER)

ablation: ## simulate every combination of the components, and measure here: table, CSV, figures, traces
	$(SETUP) workflow
	@PATH="$(BIN):$$PATH" TABLE_FOLLOWS=yes snakemake --cores $(CORES) ablation $(ARGS)
	@test ! -e results/ablation.csv || $(BIN)/python -m gpipe_bench table --brief --rows results/ablation.csv
	@scripts/setup.sh --next

test: ## run every check, two at a time, also after one failed: ruff, mypy, snakefmt, snakemake --lint, the wheel, pytest; TORCH=2.14.1: with that PyTorch
	$(SETUP) dev
	@$(MAKE) --no-print-directory --keep-going --jobs=2 $(WHOLE) $(CHECKS:%=check-%)
	@scripts/setup.sh --next

test-slow: ## run every case of the tests, and the slow ones
	@EVERY_CASE=1 $(MAKE) --no-print-directory test CHECKS='$(filter tests-%,$(CHECKS))'

check-tests-suite: ; $(TOOL) scripts.run_tests suite
check-tests-machine: ; $(TOOL) scripts.run_tests machine
check-tests-workflow: ; $(TOOL) scripts.run_tests workflow
check-tests-engine: ; $(TOOL) scripts.run_tests engine
check-ruff: ; $(TOOL) ruff check .
check-ruff-format: ; $(TOOL) ruff format --check .
check-mypy: ; $(TOOL) mypy
check-snakefmt: ; $(TOOL) snakefmt --check Snakefile workflow studies
check-snakemake-lint: ; $(TOOL) snakemake --lint
check-wheel: ; $(TOOL) scripts.check_wheel
check-sanitizers: ; $(TOOL) scripts.check_native

test-slurm: ## run a small sweep through a Slurm that is installed, started on loopback and stopped again (root)
	$(SETUP) dev
	@PATH="$(BIN):$$PATH" scripts/test_slurm.sh

peers: ## install the other pipelines that snakemake --cores 1 peers compares with
	$(SETUP) peers

reference: ## run every experiment, take the results into results/reference, draw its figures and write the tables of README and docs
	$(SETUP) workflow
	@PATH="$(BIN):$$PATH" snakemake --cores $(CORES) $(EXPERIMENTS) $(ARGS)
	@$(BIN)/python -m gpipe_bench datapackage take results
	@$(BIN)/python -m gpipe_bench figure reference --out figures/reference
	@$(BIN)/python -m studies.training reference
	@$(BIN)/python -m studies.peers reference
	@$(BIN)/python -m scripts.tables

tables: ## write the tables of README and docs from results/reference
	$(SETUP) workflow
	@$(BIN)/python -m scripts.tables

format: ## format Python and Snakemake files, and fix what ruff can fix
	$(SETUP) dev
	@$(BIN)/ruff check --fix-only --quiet . && $(BIN)/ruff format . && $(BIN)/snakefmt Snakefile workflow studies

gpu: ## GPU tests, the measured ablation and a device profile, into OUT; takes the Python that has torch
	@python="$${PYTHON:-$(BIN)/python}"; command -v "$$python" > /dev/null || python=python3; \
	  EVERY_CASE=1 "$$python" -m pytest -c /dev/null --rootdir=. --import-mode=importlib -p no:cacheprovider -m gpu tests/gpu tests/measure/test_on_gpu.py tests/suite/test_trial.py; \
	  PYTHON="$$python" scripts/gpu_session.sh "$(OUT)"

lock: ## resolve requirements/lock.txt and what is made from it again (network); ARGS=--upgrade: the newest versions
	@scripts/lock.sh $(ARGS)
