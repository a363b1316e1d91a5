#!/usr/bin/env bash
# Installs Slurm, starts a cluster of this one machine, runs a small sweep through it, and stops it again. Needs root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=$(mktemp -d)
finish() {
  scripts/slurm.sh stop "$folder"
  rm -rf "$folder"
}
trap finish EXIT
scripts/slurm.sh install
scripts/slurm.sh start "$folder"
python -m pytest -v tests/slurm "$@"
