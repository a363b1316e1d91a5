#!/usr/bin/env bash
# Makes .venv hold what requirements.lock pins, and this checkout in editable form. Says nothing when it already does.
#
# Safe to interrupt and to run again:
#   .venv/.complete    written last; a digest of all that the environment was made from, and where it stands
#   .venv/.unfinished  there while an installation runs; found later, the environment is made anew, since an
#                      interrupted pip may leave a package that only looks installed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$PWD/.venv
complete=$venv/.complete
unfinished=$venv/.unfinished
digest="$(cat requirements.lock pyproject.toml scripts/setup.sh | cksum) $PWD"
step="start"

# Runs, has a supported version, and was not moved here: the scripts in .venv/bin carry the path it was made at.
usable() {
  "$venv/bin/python" -c 'import pip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null \
    && grep -qsF "$venv/bin/python" "$venv/bin/pip"
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

if usable && [ "$(cat "$complete" 2> /dev/null)" = "$digest" ]; then
  exit 0
fi
trap report EXIT
trap 'step="$step, interrupted"; exit 130' INT TERM

if [ -d "$venv" ] && { [ -e "$unfinished" ] || ! usable; }; then
  say "remove a .venv that was left unfinished or does not run here"
  # The mark goes last: an interrupted removal must not leave what looks whole.
  touch "$unfinished"
  rm -rf "$venv"/[!.]*
  rm -rf "$venv"
fi
if [ ! -d "$venv" ]; then
  step="find Python"
  python=$(scripts/find_python.sh)
  say "make .venv with $("$python" --version) at $python"
  mkdir "$venv"
  touch "$unfinished"
  "$python" -m venv "$venv"
fi

rm -f "$complete"
touch "$unfinished"
say "install $(grep -c '^[a-z].*==' requirements.lock) pinned packages from requirements.lock (minutes the first time)"
"$venv/bin/python" -m pip install --disable-pip-version-check --requirement requirements.lock
say "install this checkout in editable form"
# The lock has everything, the build backend too: nothing unpinned comes in here.
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
"$venv/bin/python" -m pip check --disable-pip-version-check
rm -f "$unfinished"
printf '%s' "$digest" > "$complete"
printf '\n== set-up: done, .venv is complete\n\n'
