#!/usr/bin/env bash
# Makes .venv hold a layer of the pinned packages, with the layers below it, and this checkout in editable form.
#
#   scripts/setup.sh [--quiet] LAYER    workflow, models or dev: requirements/LAYER.lock; --quiet says nothing when it
#                                       is there already
#   scripts/setup.sh --next             say how to run what was installed
#
# TORCH=2.14.1 makes .venv-torch-2.14.1 instead: with that PyTorch, the torchvision that pip finds for it, and what the
# locks pin for everything else.
#
# A larger layer stays when a smaller one is asked for. Safe to interrupt and to run again:
#   .venv/.complete    written last; the layer, and a digest of all that it was made from and where it stands
#   .venv/.unfinished  there while an installation runs; found later, the environment is made anew, since an
#                      interrupted pip may leave a package that only looks installed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

layers=(run workflow models dev)
torch=${TORCH:-}
name=.venv${torch:+-torch-$torch}
venv=$PWD/$name
complete=$venv/.complete
unfinished=$venv/.unfinished
digest="$(cat requirements/{run,workflow,models,dev}.lock pyproject.toml scripts/setup.sh | cksum) $PWD"
step="start"

say_next() {
  if [ "${VIRTUAL_ENV:-}" != "$venv" ]; then
    printf 'Next, once in every terminal: source %s/bin/activate\n' "$name"
  fi
  printf 'Then: snakemake --cores 1 TARGET (docs/workflow.md lists the targets), or gpipe-bench --help\n'
}

# The place of a layer among all, from 0; -1 for none.
rank() {
  for place in "${!layers[@]}"; do
    if [ "${layers[$place]}" = "$1" ]; then
      echo "$place"
      return
    fi
  done
  echo -1
}

# Runs, has a supported version, and was not moved here: the scripts in .venv/bin carry the path it was made at.
usable() {
  "$venv/bin/python" -c 'import pip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null \
    && grep -qsF "$venv/bin/python" "$venv/bin/pip"
}

# The file of what to install for a layer: its lock; with TORCH, the pins of all its locks, changed.
requirements() {
  if [ -z "$torch" ]; then
    echo "requirements/$1.lock"
    return
  fi
  local range below
  # Without a lower end pip takes a torchvision that is so old that it asks for no PyTorch.
  range=$(grep -o 'torchvision>=[^"]*' pyproject.toml)
  for below in "${layers[@]:0:$(rank "$1")+1}"; do
    sed -E "/^(#|--)/d; s/^torch==.*/torch==$torch/; s/^torchvision==.*/$range/" "requirements/$below.lock"
  done > "$venv/requirements.txt"
  echo "$venv/requirements.txt"
}

say() {
  step=$1
  printf '\n== set-up: %s\n' "$step"
}

report() {
  local status=$?
  if [ "$status" -ne 0 ]; then
    printf '\nset-up failed at: %s (exit status %s)\nThe lines above say why. The same command goes on from here.\n' \
      "$step" "$status" >&2
  fi
}

if [ "${1:-}" = --next ]; then
  say_next
  exit 0
fi
quiet=false
if [ "${1:-}" = --quiet ]; then
  quiet=true
  shift
fi
layer=${1:-}
if [ "$(rank "$layer")" -lt 0 ]; then
  echo "layer must be one of ${layers[*]}, got '$layer'; the larger ones contain the smaller" >&2
  exit 2
fi

installed="" made_from=""
if usable && [ -e "$complete" ]; then
  read -r installed made_from < "$complete" || true
fi
if [ "$(rank "$installed")" -gt "$(rank "$layer")" ]; then
  layer=$installed
fi
if [ "$installed" = "$layer" ] && [ "$made_from" = "$digest" ]; then
  if ! "$quiet"; then
    echo "set-up: $name has the layer $layer, nothing to do"
    say_next
  fi
  exit 0
fi
trap report EXIT
trap 'step="$step, interrupted"; exit 130' INT TERM

if [ -d "$venv" ] && { [ -e "$unfinished" ] || ! usable; }; then
  say "remove a $name that was left unfinished or does not run here"
  # The mark goes last: an interrupted removal must not leave what looks whole.
  touch "$unfinished"
  rm -rf "$venv"/[!.]*
  rm -rf "$venv"
fi
if [ ! -d "$venv" ]; then
  step="find Python"
  python=$(scripts/find_python.sh)
  say "make $name with $("$python" --version) at $python"
  mkdir "$venv"
  touch "$unfinished"
  "$python" -m venv "$venv"
fi

rm -f "$complete"
touch "$unfinished"
lock=$(requirements "$layer")
say "install what $lock pins, and the layers below it (minutes the first time)"
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --requirement "$lock"
say "install this checkout in editable form"
# The locks have everything, the build backend too: nothing unpinned comes in here.
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
"$venv/bin/python" -m pip check --disable-pip-version-check
if [ -z "${CC:-}" ] && ! command -v cc > /dev/null; then
  say "install a C compiler, since there is none in PATH (100 MB)"
  "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --requirement requirements/compiler.lock || true
fi
say "compile the C code of the package"
# Only the simulator needs it. Where it cannot be compiled now, a line says why, and the first use tries again.
"$venv/bin/python" -m gpipe_bench.native || true
rm -f "$unfinished"
printf '%s %s' "$layer" "$digest" > "$complete"
printf '\n== set-up: done, %s has the layer %s\n' "$name" "$layer"
say_next
echo
