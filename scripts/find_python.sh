#!/usr/bin/env bash
# Prints the path of a Python between the versions OLDEST and NEWEST that can make virtual environments.
#
#   scripts/find_python.sh [OLDEST] [NEWEST]        default: 3.11 3.13
#
# PYTHON=/path/to/python narrows the search to that one. Of a virtual environment it prints the Python that it was
# made with: set-up may have to delete .venv, also when it is the active one.
set -euo pipefail
oldest=${1:-3.11}
newest=${2:-3.13}

probe='
import sys
oldest, newest = (tuple(map(int, version.split("."))) for version in sys.argv[1:])
if not oldest <= sys.version_info[:2] <= newest:
    sys.exit("is Python %d.%d" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit("lacks the module %s (Debian and Ubuntu: apt install python3-venv)" % error.name)
print(getattr(sys, "_base_executable", None) or sys.executable)
'

candidates=(python3 python3.11 python3.12 python3.13 python)
if [ -n "${PYTHON:-}" ]; then
  candidates=("$PYTHON")
fi
tried=()
for candidate in "${candidates[@]}"; do
  command -v "$candidate" > /dev/null || continue
  # A name may exist and still not run: version managers leave such shims in PATH.
  status=0
  found=$("$candidate" -c "$probe" "$oldest" "$newest" 2>&1) || status=$?
  case $status in
    0) echo "$found" && exit 0 ;;
    1) tried+=("$candidate ${found##*$'\n'}") ;;
    *) tried+=("$candidate does not run (exit status $status)") ;;
  esac
done

echo "python must be a version from $oldest to $newest that can make virtual environments, got none of" \
  "${candidates[*]}; install one, or name it: make PYTHON=/path/to/python$oldest ..." >&2
if [ ${#tried[@]} -gt 0 ]; then
  printf '  %s\n' "${tried[@]}" >&2
fi
exit 1
