#!/usr/bin/env bash
# What the GPUs of this machine are worth, in ten minutes: a device profile, a race of peers, and the measured ablation.
#
#   scripts/gpu_session.sh FOLDER
#
# Needs PyTorch and CUDA, and neither a network nor Snakemake. The published variants come first; what the time does not
# suffice for is a row with status skipped. FOLDER gets eight files; bundle.tar.gz also has raw results, events, traces
# and the race. Variables: PYTHON; BUDGET_S, seconds for everything; DEVICE, cuda or cpu to rehearse; CELLS, a file of
# cells in place of the ablation's; RACE, options of the race.
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

[ "$#" -eq 1 ] || fail "folder must be given, got $# words; see the head of $0"
python=${PYTHON:-python3} device=${DEVICE:-cuda} budget=${BUDGET_S:-570} race=${RACE:---preset short}
mkdir -p "$1"
out=$(cd "$1" && pwd)
[ -z "$(ls "$out")" ] || fail "folder must be empty, got $1; name another or remove it"
export PYTHONPATH="$(cd "$(dirname "$0")/.." && pwd)${PYTHONPATH:+:$PYTHONPATH}"
log=$out/log.txt

left() { echo $((SECONDS < budget ? budget - SECONDS : 0)); }

step() { # NAME SECONDS COMMAND: runs it for so long at most, and says how it ended
  local most=$(($2 < $(left) ? $2 : $(left))) status=0
  timeout --kill-after=10 "$((most > 0 ? most : 1))" "$python" -m "${@:3}" >> "$log" 2>&1 || status=$?
  echo "$1: $([ "$status" -eq 0 ] && echo done || echo "ended with status $status, see log.txt")" | tee -a "$log" >&2
}

mkdir "$out/raw"
"$python" - "$out/raw" "$device" "${CELLS:-}" << 'CELLS' || { rm -r "$out"; exit 2; }
import sys
from pathlib import Path
from gpipe_bench.suite.experiments.config import load_config
from gpipe_bench.suite.cell_files import cells_text, read_cells
from gpipe_bench.suite.cells import MeasuredCell
from gpipe_bench.suite.machine import find_machine
from gpipe_bench.components import PUBLISHED
from gpipe_bench.errors import GpipeBenchError

folder, device, given = sys.argv[1:]
try:
    runs = load_config([]).experiment("ablation").runs(find_machine(device))
    cells = read_cells(Path(given), MeasuredCell) if given else [run.cell for run in runs]
except GpipeBenchError as error:
    sys.exit(f"error: {error}")
for name, published in (("published", True), ("others", False)):
    if chosen := [cell for cell in cells if (cell.variant in PUBLISHED) == published]:
        Path(folder, f"cells_{name}.json").write_text(cells_text(chosen))
CELLS

step "device profile" 180 gpipe_bench profile --device "$device" --out "$out/profile.yaml"
# shellcheck disable=SC2086 - options are words
(cd "${PYTHONPATH%%:*}" && step "race of peers" 120 studies.peers run --device "$device" $race --out "$out/race/peers.csv")
for part in published:4 others:2; do
  cells=$out/raw/cells_${part%:*}.json
  [ -e "$cells" ] || continue
  "$python" -m gpipe_bench run --cells "$cells" --repeats "${part#*:}" --budget-s "$(left)" \
    --out "$out/raw/${part%:*}.json"
done
"$python" -m gpipe_bench collect --experiment ablation --out "$out/ablation.csv" "$out"/raw/[po]*.json
for variant in $("$python" -c 'from gpipe_bench.components import PUBLISHED; print(*PUBLISHED)'); do
  "$python" -m gpipe_bench trace --events "$out/ablation_events.csv" --variant "$variant" --out "$out/traces/$variant.json"
done
"$python" -c 'from importlib.metadata import distributions as found
print(*sorted(f"{one.name}=={one.version}" for one in found()), sep="\n")' > "$out/packages.txt"
tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
mv "$out.tar.gz" "$out/bundle.tar.gz"
rm -r "$out/raw" "$out/traces" "$out/race" "$out/ablation_events.csv"
"$python" -m gpipe_bench table --rows "$out/ablation.csv"
grep -q ",ok," "$out/ablation.csv" || fail "a run must succeed, got none; see $out/ablation.csv and $log"
