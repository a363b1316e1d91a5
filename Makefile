# Each target sets up what it needs first: nothing but Python 3.11 to 3.13 has to be there.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup peers ablation test test-slurm format gpu lock tables reference

# Cores for the workflow. Timed jobs run one at a time whatever this is.
CORES ?= 1
# More arguments for snakemake: make ablation ARGS='--configfile my.yaml'
ARGS ?=
# Some of the checks only: make test CHECKS='mypy pytest'
CHECKS ?=
# Folder that `make gpu` writes rows and traces to.
OUT ?= results/gpu
# What `make reference` runs: all but the check against the rows that it is to replace.
EXPERIMENTS := ablation speed memory sweep advice timeline transparency
# The Python that .venv is made with; empty: the first suitable one in PATH.
PYTHON ?=
export PYTHON

BIN := $(CURDIR)/.venv/bin

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' Makefile

setup: ## make .venv and install the pinned dependencies; nothing when that is done
	@scripts/setup.sh

ablation: setup ## measure every combination of the components here: table, CSV, figures, traces
	@PATH="$(BIN):$$PATH" snakemake --cores $(CORES) ablation $(ARGS)

test: setup ## run every check: ruff, mypy, snakefmt, snakemake --lint, pytest
	@PATH="$(BIN):$$PATH" python -m scripts.check $(CHECKS)

test-slurm: setup ## run a small sweep through a Slurm that is installed, started on loopback and stopped again (root)
	@PATH="$(BIN):$$PATH" scripts/test_slurm.sh

peers: setup ## install the other pipelines that snakemake --cores 1 peers compares with
	@$(BIN)/python -m pip install --quiet --no-deps --requirement requirements-peers.txt

reference: setup ## run every experiment, take the results into results/reference, draw its figures and write the tables of README and docs
	@PATH="$(BIN):$$PATH" snakemake --cores $(CORES) $(EXPERIMENTS) $(ARGS)
	@$(BIN)/python -m gpipe_bench datapackage take results
	@$(BIN)/python -m gpipe_bench figure reference --out figures/reference
	@$(BIN)/python -m scripts.tables

tables: setup ## write the tables of README and docs from results/reference
	@$(BIN)/python -m scripts.tables

format: setup ## format Python and Snakemake files, and fix what ruff can fix
	@$(BIN)/ruff check --fix-only --quiet . && $(BIN)/ruff format . && $(BIN)/snakefmt Snakefile workflows

gpu: ## GPU tests, the measured ablation and a device profile, into OUT; takes the Python that has torch
	@python="$${PYTHON:-$(BIN)/python}"; command -v "$$python" > /dev/null || python=python3; \
	  "$$python" -m gpipe_bench gpu --out "$(OUT)"

lock: ## resolve requirements.lock and environment.yml anew (Python 3.11, network)
	@python=$$(scripts/find_python.sh 3.11 3.11) && "$$python" -m scripts.lock
