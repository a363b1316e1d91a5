#!/usr/bin/env bash
# Resolves the lock, and writes what is generated from it.
#
#   scripts/lock.sh [--upgrade]         --upgrade: the newest versions, instead of those in the lock that still fit
#
#   requirements/lock.txt               every extra, for all supported Pythons and platforms, with hashes
#   requirements/uv.txt                 uv, which installs the others
#   environment.yml                     the layer models and the checkout, for users of conda
#   workflow/envs/gpipe_bench.yaml     the environment of the rules for `snakemake --sdm conda`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/uv.sh
# What only this machine offers stays out.
unset UV_EXTRA_INDEX_URL UV_FIND_LINKS

compile() {
  "$uv" pip compile --quiet --no-annotate --python-version 3.11 --custom-compile-command 'make lock' "$@"
}

# The pip part of a conda environment: some extras, as the lock pins them, but what torch pins itself. That exists for
# some platforms only, and builds of torch for the CPU do not need it.
pinned() {
  compile --no-header --constraint requirements/lock.txt pyproject.toml "$@" \
    | grep -Ev '^(cuda-|triton==|nvidia-[^m])' | sed 's/^/      - /'
}

compile --universal --generate-hashes "$@" --all-extras pyproject.toml requirements/pins.in \
  --output-file requirements/lock.txt > /dev/null
echo uv | compile --universal --generate-hashes "$@" - --output-file requirements/uv.txt > /dev/null

conda='channels:
  - conda-forge
dependencies:
  - python=3.11
  - pip
  - pip:'
rules=$(pinned --extra workflow --extra slurm --extra data)
cat > workflow/envs/gpipe_bench.yaml << END
# The environment of the rules for \`snakemake --sdm conda\`: \`make lock\` writes it.
# Rules run in the checkout, where Python finds the package: it is not installed.
$conda
$rules
END
all=$(pinned --extra workflow --extra slurm --extra data --extra models)
cat > environment.yml << END
# For conda users, written by \`make lock\`: all but the tools of development, and this checkout in editable form.
#   conda env create --file environment.yml && conda activate gpipe_bench
name: gpipe_bench
$conda
$all
      - --editable .
END
