"""Makes the efficiencies of a profile from rows that were measured on one device.

Three shares of a peak are fitted, by least squares of relative errors. A departure from the profile costs as much as an
error does, so that what the rows do not tell stays what the profile says. The spread of a share is an interval of 95 %,
by linear propagation of the errors that rows and the profile's shares may have. It is wide where rows are of similar
models, since what one class of kernels loses another one gains.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from gpipe_bench.errors import ConfigError
from gpipe_bench.models.table import MODELS
from gpipe_bench.rows import Row
from gpipe_bench.simulator.fit import Calibration, Observation, errors_of, fitted_profile, observe, with_shares
from gpipe_bench.simulator.hardware.profile import DIRECT_SHARE, FAST_SHARE, Profile
from gpipe_bench.simulator.published.settings import UNCUT, Setting

SHARES: Final = ("conv3x3_stride1", "other_conv_matmul", "memory_bound")
"""The efficiencies, in the order of the fit; other ones keep their ratio to ``other_conv_matmul``."""

# The other ones, and the largest that each may be.
_TIED: Final = MappingProxyType({"spatial_conv": FAST_SHARE, "matmul": DIRECT_SHARE})
# A row is trusted to 3 %; a share may well be three times what the profile assumes.
_ROW: Final = 0.03
_PRIOR: Final = log(3)
_SIZE_OR_FORM: Final = re.compile(r"\b\d+ ?gi?b\b|\b(sxm|hbm|gddr|pcie)\d*e?\b")
# Of a normal distribution, 95 % lie as many standard deviations about the mean.
_SIGMAS: Final = 1.96


def calibrate_rows(
    rows: Sequence[Row], profile: Profile, *, optimizer: str = "sgd", name: str = "", cache: Path | None = None
) -> Calibration:
    """Fit the efficiencies of ``profile`` to measured rows; ``spread`` has intervals of 95 %.

    Of the repeats of a cell the median counts. Only rows of one partition on one device are used: nothing overlaps in
    them, so their time is that of their kernels.

    Args:
        rows: of models of the suite; others are ignored.
        profile: the device; everything is kept but its efficiencies, and constants of kinds of kernels.
        optimizer: the one that the runs used.
        name: of the new profile; that of ``profile`` by default.
        cache: folder of stored traces; the user's cache folder by default.

    Raises:
        ConfigError: no row can be used, rows are of several devices or of another one than the profile's, one is
            faster than the profile's peaks allow, whatever the others are, or profiles refuse a fitted share.
    """
    # What is fitted says how long kernels take, so constants of their kinds do not.
    profile = profile.model_copy(update={"kernels": None})
    cells: dict[Setting, list[float]] = {}
    used = [row for row in rows if _usable(row)]
    devices = sorted({row.device for row in used})
    if len(devices) != 1:
        got = f"rows of {', '.join(devices)}" if devices else f"none among {len(rows)}"
        raise ConfigError(
            [f"rows must hold measured ones of one device with one partition, got {got}; measure or choose such rows"]
        )
    if not is_of_device(devices[0], profile.device):
        problem = f"rows must be of the device of profile {profile.name}, {profile.device}, got rows of {devices[0]}"
        raise ConfigError([f"{problem}; choose the profile of that device, or write one with its name and peaks"])
    for row in used:
        cells.setdefault(_setting(row, optimizer), []).append(row.throughput_samples_per_s or 0.0)
    seen = [observe(setting, median(values), cache) for setting, values in cells.items()]
    _check_possible(seen, profile, devices[0])
    shares, spread = _fitted(seen, profile)
    origin = f"fitted to {len(seen)} cells measured on {devices[0]}, from the efficiencies of {profile.name}"
    update = {"name": name or profile.name, "sources": {**profile.sources, "efficiency": origin}}
    fitted = fitted_profile(profile, _with_tied(profile, shares)).model_copy(update=update)
    intervals = dict(zip(SHARES, spread, strict=True))
    return Calibration(fitted, errors_of(seen, fitted), intervals, ignored=len(rows) - len(used))


def is_of_device(measured: str, device: str) -> bool:
    """Whether ``measured``, as the driver names a device, may be ``device``, as a profile names it.

    They differ in brand, form and memory; what counts are words such as A100 or 4090. Without one in ``device``, or
    with nothing in ``measured``, there is no telling.
    """
    models = {word for word in _words(device) if re.search(r"\d", word)}
    return not models or not measured or bool(models & _words(measured))


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", _SIZE_OR_FORM.sub(" ", name.lower())))


def _usable(row: Row) -> bool:
    alone = (row.partitions, row.device_count) == (1, 1)
    return alone and row.evidence == "measured" and bool(row.throughput_samples_per_s) and row.model in MODELS


def _setting(row: Row, optimizer: str) -> Setting:
    chunks, batch_size = row.chunks or 1, row.batch_size or 1
    return Setting(
        table=row.model,
        experiment=f"({row.model_args}) m={chunks} {row.checkpoint} batch {batch_size}",
        model=row.model,
        model_args=row.model_args,
        partitions=1,
        chunks=chunks,
        checkpoint=row.checkpoint,
        batch_size=batch_size,
        balance=UNCUT,
        full_steps=1,
        rest_batch_size=0,
        optimizer=optimizer,
    )


def _fitted(seen: Sequence[Observation], profile: Profile) -> tuple[tuple[float, ...], list[tuple[float, float]]]:
    """The shares, and the interval of each."""
    start = [log(getattr(profile.efficiency, share)) for share in SHARES]

    def residuals(logs: Sequence[float]) -> list[float]:
        candidate = with_shares(profile, _with_tied(profile, [exp(value) for value in logs]))
        errors = [log(row.simulated(candidate) / row.samples_per_s) / _ROW for row in seen]
        return [*errors, *((value - first) / _PRIOR for value, first in zip(logs, start, strict=True))]

    most = [log(limit) for limit in _limits(profile)]
    # Durations are whole nanoseconds, so a derivative needs a step that is not too small.
    found = least_squares(residuals, start, bounds=(-np.inf, most), diff_step=1e-3)
    # Residuals are in units of the expected ones; where they are larger, intervals are wider.
    scatter = max(1.0, 2 * found.cost / len(seen))
    widths = _SIGMAS * np.sqrt(scatter * np.diag(np.linalg.inv(found.jac.T @ found.jac)))
    spread = np.exp([found.x - widths, np.minimum(found.x + widths, most)])
    return tuple(exp(value) for value in found.x), list(zip(*spread.tolist(), strict=True))


def _limits(profile: Profile) -> tuple[float, ...]:
    """The largest shares that may be."""
    efficiency = profile.efficiency
    tied = [(getattr(efficiency, name), most) for name, most in _TIED.items()]
    others = [most * efficiency.other_conv_matmul / share for share, most in tied if share is not None]
    return FAST_SHARE, min(DIRECT_SHARE, *others), DIRECT_SHARE


def _with_tied(profile: Profile, shares: Sequence[float]) -> dict[str, float | None]:
    """Fitted shares, and those that keep their ratio to one of them, as far as their limits let them."""
    values: dict[str, float | None] = dict(zip(SHARES, shares, strict=True))
    moved = shares[SHARES.index("other_conv_matmul")] / profile.efficiency.other_conv_matmul
    for name, most in _TIED.items():
        share = getattr(profile.efficiency, name)
        values[name] = None if share is None else min(share * moved, most)
    return values


def _check_possible(seen: Sequence[Observation], profile: Profile, device: str) -> None:
    """Refuse rows that are faster than with the largest shares, by more than a row may be wrong."""
    fastest = with_shares(profile, _with_tied(profile, _limits(profile)))
    faster = {row.name: row.samples_per_s * row.device_ns(fastest) / row.samples / 1e9 - 1 for row in seen}
    problems = [
        f"rows of {device} must be within the peaks of profile {profile.name}, got {name} {more:.0%} faster than at "
        "these peaks; correct the profile's peaks or check the rows"
        for name, more in faster.items()
        if more > _SIGMAS * _ROW
    ]
    if problems:
        raise ConfigError(problems)
