"""Makes the efficiencies of a profile from rows that were measured on one device.

Three shares of a peak are fitted, by least squares of relative errors. What the rows do not tell stays what the profile
says: a departure from it costs as much as an error does, but for rows that agree to a few percent it hardly counts. So
one row is enough, and rows of models of different make tell more. How far the shares move when each row in turn is left
out is their spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any, Final

from pydantic import ValidationError
from scipy.optimize import least_squares

from gpipe_bench.errors import ConfigError
from gpipe_bench.rows import Row
from gpipe_bench.simulator.fit import Observation, observe
from gpipe_bench.simulator.hardware.profile import Efficiency, Profile
from gpipe_bench.simulator.hardware.profile_rules import is_of_device
from gpipe_bench.simulator.published.settings import Setting
from models.table import MODELS

__all__ = ["SHARES", "RowFit", "calibrate_rows"]

SHARES: Final = ("conv3x3_stride1", "other_conv_matmul", "memory_bound")
"""The efficiencies, in the order of the fit; other ones keep their ratio to ``other_conv_matmul``."""

# A row is trusted to 3 %; a share may well be three times what the profile assumes.
_ROW: Final = 0.03
_PRIOR: Final = log(3)
_ALL_LAYERS: Final = 10**6

_Key = tuple[str, str, int, str, int]


@dataclass(frozen=True, slots=True)
class RowFit:
    """Fitted efficiencies.

    Attributes:
        profile: the profile with them.
        errors: cell -> simulated over measured throughput, minus 1.
        spread: efficiency -> (smallest, largest) with all cells and with each in turn left out; empty for one.
        ignored: rows that were not of one device, or failed.
    """

    profile: Profile
    errors: dict[str, float]
    spread: dict[str, tuple[float, float]]
    ignored: int


def calibrate_rows(
    rows: Sequence[Row], profile: Profile, *, optimizer: str = "sgd", name: str = "", cache: Path | None = None
) -> RowFit:
    """Fit the efficiencies of ``profile`` to measured rows.

    Of the repeats of a cell the median counts. Only rows of one partition on one device are used: nothing overlaps in
    them, so their time is that of their kernels.

    Args:
        rows: of models of the suite; others are ignored.
        profile: the device; everything but its efficiencies is kept.
        optimizer: the one that the runs used.
        name: of the new profile; that of ``profile`` by default.
        cache: folder of stored traces; the user's cache folder by default.

    Raises:
        ConfigError: no row can be used, rows are of several devices or of another one than the profile's, or they are
            faster than the profile's peaks allow.
    """
    cells: dict[_Key, list[float]] = {}
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
        cells.setdefault(_key(row), []).append(row.throughput_samples_per_s or 0.0)
    seen = [observe(_setting(key, optimizer), median(values), cache) for key, values in cells.items()]
    shares = _fitted(seen, profile)
    _check_possible(_with_shares(profile, shares), devices[0])
    others = [_fitted([row for row in seen if row is not left_out], profile) for left_out in seen if len(seen) > 1]
    origin = f"fitted to {len(seen)} cells measured on {devices[0]}, from the efficiencies of {profile.name}"
    update = {"name": name or profile.name, "sources": {**profile.sources, "efficiency": origin}}
    fitted = _with_shares(profile, shares).model_copy(update=update)
    return RowFit(
        fitted,
        {row.name: row.simulated(fitted) / row.samples_per_s - 1 for row in seen},
        {share: (min(found), max(found)) for share, *found in zip(SHARES, shares, *others, strict=True) if others},
        len(rows) - len(used),
    )


def _usable(row: Row) -> bool:
    alone = (row.partitions, row.device_count) == (1, 1)
    return alone and row.evidence == "measured" and bool(row.throughput_samples_per_s) and row.model in MODELS


def _key(row: Row) -> _Key:
    return row.model, row.model_args, row.chunks or 1, row.checkpoint, row.batch_size or 1


def _setting(key: _Key, optimizer: str) -> Setting:
    model, model_args, chunks, checkpoint, batch_size = key
    return Setting(
        table=model,
        experiment=f"({model_args}) m={chunks} {checkpoint} batch {batch_size}",
        model=model,
        model_args=model_args,
        partitions=1,
        chunks=chunks,
        checkpoint=checkpoint,
        batch_size=batch_size,
        balance=(_ALL_LAYERS,),
        full_steps=1,
        rest_batch_size=0,
        optimizer=optimizer,
    )


def _fitted(rows: Iterable[Observation], profile: Profile) -> tuple[float, ...]:
    seen = list(rows)
    start = [log(getattr(profile.efficiency, share)) for share in SHARES]

    def residuals(logs: Sequence[float]) -> list[float]:
        candidate = _with_shares(profile, tuple(exp(value) for value in logs))
        errors = [log(row.simulated(candidate) / row.samples_per_s) / _ROW for row in seen]
        return [*errors, *((value - first) / _PRIOR for value, first in zip(logs, start, strict=True))]

    # Durations are whole nanoseconds, so a derivative needs a step that is not too small.
    found = least_squares(residuals, start, diff_step=1e-3)
    return tuple(round(exp(value), 3) for value in found.x)


def _with_shares(profile: Profile, shares: Sequence[float]) -> Profile:
    values: dict[str, Any] = {**dict(zip(SHARES, shares, strict=True)), "origin": "fitted"}
    moved = values["other_conv_matmul"] / profile.efficiency.other_conv_matmul
    for name in ("spatial_conv", "matmul"):
        share = getattr(profile.efficiency, name)
        values[name] = None if share is None else round(share * moved, 3)
    # Not checked here: while a fit looks for shares, it may try impossible ones.
    return profile.model_copy(update={"efficiency": profile.efficiency.model_copy(update=values)})


def _check_possible(fitted: Profile, device: str) -> None:
    try:
        Efficiency.model_validate(fitted.efficiency.model_dump())
    except ValidationError as error:
        problems = [
            f"rows of {device} must be within the peaks of profile {fitted.name}, got a share {item['loc'][0]} of "
            f"{item['input']:g}, {item['msg'].removeprefix('Input ')}; correct the profile's peaks or check the rows"
            for item in error.errors()
        ]
        raise ConfigError(problems) from None
