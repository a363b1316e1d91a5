"""How far simulated throughputs and memories of one profile are off, where runs on such hardware are known."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.results.schema import TABLES
from gpipe_bench.results.tables import plain_records, read_records, read_table

_QUANTITIES: Final = {"samples/s": ("throughput", "model_flops"), "GiB": ("peak_reserved_gib", "fullest_peak")}
"""How the names of their metrics begin; the memory of parameters alone is counted, and says nothing of a run."""
_STEPS: Final = {"h200": "measured/1x-nvidia-h200/single.csv"}
"""Measured steps of one device by profile; the simulated ones are in the same order."""


def error_words(profile: str) -> str:
    """The errors of samples/s and GiB that were simulated on a profile, none of them fitted, as a sentence.

    Args:
        profile: its name; a file of one's own has no known runs.
    """
    said, unknown = [], []
    for quantity, errors in known_errors(profile).items():
        if errors:
            said.append(f"{quantity} {_range(errors)}")
        else:
            unknown.append(quantity)
    said += [f"{' and '.join(unknown)} never compared with a run"] if unknown else []
    return f"error on {profile}: {'; '.join(said)} (docs/simulator_errors.md)"


def speed_error_words(profile: str) -> str:
    """The same of samples/s alone, for runs whose kernels take the time that the simulator gives them.

    Returns:
        a line; an empty text where no run is known.
    """
    errors = known_errors(profile)["samples/s"]
    return f"error of simulated samples/s on {profile}: {_range(errors)}" if errors else ""


def known_errors(profile: str) -> dict[str, list[float]]:
    """Simulated over published or measured value, minus 1, of each known run by quantity."""
    table = REFERENCE_FOLDER / "simulated" / profile / "predictions.csv"
    found: dict[str, list[float]] = {quantity: [] for quantity in _QUANTITIES}
    if table.is_file():
        for line in plain_records(read_table(table, TABLES["predictions"].columns, kind="predictions")):
            for quantity, starts in _QUANTITIES.items():
                known = line["error_fraction"] is not None and line["role"] != "fitted"
                if known and line["metric"].startswith(starts):
                    found[quantity].append(line["error_fraction"])
    if profile in _STEPS:
        measured, simulated = (_speeds(place) for place in (_STEPS[profile], f"simulated/{profile}/single.csv"))
        found["samples/s"] += [own / real - 1 for own, real in zip(simulated, measured, strict=True)]
    return found


def _range(errors: Sequence[float]) -> str:
    mean = f"mean {fmean(map(abs, errors)):.0%}"
    return f"{min(errors):+.0%} to {max(errors):+.0%} in {len(errors)} known runs, {mean}"


def _speeds(place: str) -> list[float]:
    from gpipe_bench.results.rows import Row

    rows = read_records(REFERENCE_FOLDER / place, (), Row)
    return [row.throughput_samples_per_s or 0.0 for row in rows if row.status == "ok"]
