#!/usr/bin/env bash
# Makes .venv hold a layer of the packages that requirements/lock.txt pins, and this checkout in editable form.
#
#   scripts/setup.sh [--quiet] LAYER    run, workflow, models, dev or peers; --quiet: says nothing if it is there already
#   scripts/setup.sh --next             say how to run what was installed
#
# A layer is some extras of pyproject.toml. What is there stays when less is asked for.
#
# TORCH=2.14.1 makes .venv-torch-2.14.1 instead: with that PyTorch, the torchvision that belongs to it, and what the
# lock pins for everything else. PYTHON=/path/to/python makes the environment with that one, and not with the first
# suitable one in PATH.
#
# Safe to interrupt and to run again. .venv/.made-from is written last: the extras, and a digest of what they were made
# from and where .venv stands. An environment without it, or whose Python is gone, is made anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch=${TORCH:-}
name=.venv${torch:+-torch-$torch}

say_next() {
  if [ "${VIRTUAL_ENV:-}" != "$PWD/$name" ]; then
    printf 'Next, once in every terminal: source %s/bin/activate\n' "$name"
  fi
  printf 'Then: snakemake --cores 1 TARGET (docs/workflow.md lists the targets), or gpipe-bench --help\n'
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
case $layer in
  run) extras= ;;
  workflow) extras='workflow slurm data' ;;
  models) extras='workflow slurm data models' ;;
  dev) extras='workflow slurm data models dev' ;;
  peers) extras='workflow slurm data peers' ;;
  *)
    echo "layer must be one of run, workflow, models, dev, peers, got '$layer'; name one of these" >&2
    exit 2
    ;;
esac

digest="$(cat requirements/lock.txt pyproject.toml scripts/setup.sh | cksum) $PWD"
usable=false there='' made_from=''
if "$name/bin/python" -c '' 2> /dev/null && [ -e "$name/.made-from" ]; then
  usable=true
  { read -r there; read -r made_from; } < "$name/.made-from"
fi
if [ -z "${CC:-}" ] && ! command -v cc > /dev/null; then
  extras="$extras compiler"
fi
extras=$(printf '%s\n' $there $extras | sort -u | xargs)
if "$usable" && [ "$extras" = "$there" ] && [ "$made_from" = "$digest" ]; then
  if ! "$quiet"; then
    echo "set-up: $name has the layer $layer, nothing to do"
    say_next
  fi
  exit 0
fi
trap 'echo "set-up failed; the lines above say why. The same command goes on from here." >&2' ERR

. scripts/uv.sh
# An environment that was moved carries its old path in its scripts.
if ! "$usable" || [ "${made_from#* * }" != "$PWD" ]; then
  printf '== set-up: make %s\n' "$name"
  "$uv" venv --quiet --clear --python "${PYTHON:->=3.11,<3.15}" "$name"
fi
rm -f "$name/.made-from"

# Where packages have other sources, PyTorch may be another build, such as one for the CPU: its hashes are not checked
# then. With TORCH it is another version. Both hold for what PyTorch brings along, too.
sources=${UV_DEFAULT_INDEX:-}${UV_INDEX:-}${UV_EXTRA_INDEX_URL:-}${UV_FIND_LINKS:-}${UV_TORCH_BACKEND:-}
awk -v other="$torch" -v unchecked="$sources" '
  /^[a-z]/ { built = /^(torch|torchvision|triton|cuda-.*|nvidia-.*)==/ && !/^nvidia-ml-py/ }
  built && other != "" { next }
  built && unchecked != "" { if (!/^[a-z]/) next; sub(/ \\$/, "") }
  { print }
' requirements/lock.txt > "$name/constraints.txt"
if [ -n "$torch" ]; then
  echo "torch==$torch" >> "$name/constraints.txt"
fi
printf '== set-up: install the layer %s and this checkout into %s\n' "$layer" "$name"
"$uv" pip install --python "$name" --constraint "$name/constraints.txt" --build-constraint requirements/lock.txt \
  pip setuptools --editable ".[${extras// /,}]"
case " $extras " in
  *' models '*)
    # Lets `import torchvision` succeed beside a PyTorch for the CPU: models/torchvision_repair.py says how.
    packages=$(echo "$name"/lib/python3*/site-packages)
    ln -sf "$PWD/models/torchvision_repair.py" "$packages"
    echo 'import torchvision_repair; torchvision_repair.mend_torchvision()' > "$packages/torchvision_repair.pth"
    ;;
esac
printf '== set-up: compile the C code of the package\n'
# Only the simulator needs it. Where it cannot be compiled now, a line says why, and the first use tries again.
"$name/bin/python" -m gpipe_bench.native || true
printf '%s\n%s\n' "$extras" "$digest" > "$name/.made-from"
printf '== set-up: done\n'
say_next
