"""Fit the share of the peak that attention without dropout reaches on an A100, to throughputs of MPT-1b.

    python -m studies.kernels.attention

One share for both passes and all lengths, by least squares of relative errors. Rows of other models are predicted.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import fmean
from typing import Final

import yaml
from scipy.optimize import least_squares

from gpipe_bench.machine.constants import CONSTANTS
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.simulator.constants_fit import with_constants
from gpipe_bench.simulator.published.settings import PublishedSetting, published_value, settings_of
from gpipe_bench.suite.published.simulations import simulate_published
from gpipe_bench.suite.running.simulated import simulation_facts

SHARES: Final = [name for name in CONSTANTS if "no_dropout_half" in name]


def error(row: PublishedSetting, share: float) -> float:
    """Logarithm of the simulated over the published throughput where attention reaches a share of the peak."""
    profile = with_constants(load_profile(row.profile), dict.fromkeys(SHARES, share))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.yaml"
        path.write_text(yaml.safe_dump(profile.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
        found = simulate_published(replace(row, profile=str(path)), simulation_facts()).row.throughput_samples_per_s
    return log((found or 0) / published_value(row, "throughput_samples_per_s_per_device"))


def fitted_share(rows: list[PublishedSetting]) -> float:
    """The share that fits the rows best."""
    found = least_squares(lambda share: [error(row, float(share[0])) for row in rows], 0.2, diff_step=1e-3)
    return float(found.x[0])


if __name__ == "__main__":
    table = settings_of("llm-foundry")
    seen = [row for row in table if row.role == "fitted"]
    best = fitted_share(seen)
    print(f"fitted to {len(seen)} throughputs of MPT-1b: {best:.4f} of the peak; the profile a100 has it rounded")
    for said, rows in (("fitted", seen), ("predicted", [row for row in table if row not in seen])):
        for row in rows:
            print(f"{row.experiment:<12}  {100 * error(row, best):+5.1f} %  {said}")
        mean = fmean(abs(error(row, best)) for row in rows)
        print(f"mean absolute error of {len(rows)} cells: {100 * mean:.2f} %")
