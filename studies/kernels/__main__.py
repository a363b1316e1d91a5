"""Print measured and simulated device time of operators of the training steps on an H200, by kind of operator.

    python -m studies.kernels

Those are compared whose arguments are tensors alone, so that their shapes say all.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from gpipe_bench.kernels.cost import duration_ns
from gpipe_bench.kernels.operations import kernels_of
from gpipe_bench.machine.profile import load_profile

OPERATORS: Final = Path(__file__).with_name("ops_h200.csv.gz")
"""Columns: model, dtype, batch; operator, shapes of its arguments, calls in a step; device and host time of all, us."""

_COMPARED: Final = ("mm", "bmm", "addmm", "leaky_relu", "gelu", "sigmoid")


def rows() -> Iterator[dict[str, str]]:
    """The lines of :data:`OPERATORS`."""
    with gzip.open(OPERATORS, "rt", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def compared() -> dict[tuple[str, str], tuple[float, float]]:
    """For each operator and type: device time of all of its calls, measured and simulated, in us."""
    profile, found = load_profile("h200"), dict[tuple[str, str], tuple[float, float]]()
    for row in rows():
        name = row["op"].removeprefix("aten::")
        if name in _COMPARED:
            dtype = getattr(torch, row["dtype"])
            shapes = [shape for shape in json.loads(row["shapes"]) if shape]
            args = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
            overload = getattr(torch.ops.aten, name).default
            kernels = kernels_of(overload, args, {}, overload(*args))
            simulated = int(row["count"]) * sum(duration_ns(kernel, profile) for kernel in kernels) / 1000
            measured, before = found.get((name, row["dtype"]), (0.0, 0.0))
            found[name, row["dtype"]] = measured + float(row["device_us"]), before + simulated
    return found


if __name__ == "__main__":
    print(f"{'operator':<12}  {'type':<9}  {'measured':>10}  {'simulated':>10}  {'ratio':>6}")
    for (operator, kind), (measured_us, law_us) in sorted(compared().items()):
        ratio = law_us / measured_us
        print(f"{operator:<12}  {kind:<9}  {measured_us:>7.0f} us  {law_us:>7.0f} us  {ratio:>6.2f}")
