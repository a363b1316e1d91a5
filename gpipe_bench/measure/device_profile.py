"""One profile of a device: what it achieves on each class of kernels, on its links, and what a launch costs.

Every figure is measured here and now, with the spread over its repeats; none is a data sheet's. The samples
themselves are kept, so that any other summary can be made later.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, Final

import torch

from gpipe_bench.measure.clock import synchronize
from gpipe_bench.measure.devices import distinct_accelerators, distinct_devices
from gpipe_bench.measure.environment import environment_facts
from gpipe_bench.measure.kernels import KERNEL_CLASSES, KernelCase, kernel_cases
from gpipe_bench.measure.links import LinkCase, link_cases
from gpipe_bench.measure.spread import repeated, spread

SCHEMA_VERSION: Final = 1

_US_PER_S: Final = 1e6
_GIGA: Final = 1e9
_LAUNCHES: Final = 200  # well below the thousand or so that a launch queue holds, so that the host never waits

Run = Callable[[], object]
Row = dict[str, Any]


def measure_device_profile(device: torch.device | str, seconds: float = 60.0) -> Row:
    """Measure ``device``; the result is plain data, ready for JSON.

    Time is shared evenly among the cases. A case makes three repeats at least, so on a slow device the whole takes
    longer than asked for. A case that does not fit into memory has ``status`` oom and no figures.

    Args:
        device: CPU or accelerator.
        seconds: about how long to measure.

    Returns:
        ``kernels``, ``links`` and ``launch``: one row per case, with ``samples_us`` (per call, one per repeat) and
        spreads {min, median, max} of rates; ``classes``: the spread over all repeats of a class. GB are 10^9 bytes.

    Raises:
        ValueError: ``seconds`` is not positive.
    """
    if seconds <= 0:
        raise ValueError(f"seconds must be positive, got {seconds}; pass the time that the profile may take")
    (target,) = distinct_devices([device])
    kernels, links = list(kernel_cases(target)), list(link_cases(target))
    budget = _Budget(seconds, cases=len(kernels) + len(links) + 2)
    kernel_rows = [_kernel_row(case, target, budget) for case in kernels]
    return {
        "schema_version": SCHEMA_VERSION,
        "seconds_asked": seconds,
        "environment": environment_facts([target]),
        "settings": _settings(),
        "classes": _classes(kernel_rows),
        "kernels": kernel_rows,
        "links": [_link_row(case, budget) for case in links],
        "launch": [
            _launch_row("host_per_launch", target, budget, host_only=True),
            _launch_row("device_per_launch", target, budget, host_only=False),
        ],
    }


class _Budget:
    """Shares the seconds left evenly among the cases left."""

    def __init__(self, seconds: float, cases: int) -> None:
        self._end = perf_counter() + seconds
        self._cases = cases

    def next(self) -> float:
        """Seconds for the next case."""
        share = max(self._end - perf_counter(), 0.0) / max(self._cases, 1)
        self._cases -= 1
        return share


def _kernel_row(case: KernelCase, device: torch.device, budget: _Budget) -> Row:
    row: Row = {"class": case.kernel_class, "name": case.name, "direction": case.direction}
    row |= {"flop": case.flop, "bytes": case.nbytes}
    return _rates(row | _samples(case.prepare, [device], budget))


def _link_row(case: LinkCase, budget: _Budget) -> Row:
    row: Row = {"link": case.link, "source": case.source, "target": case.target, "memory": case.memory}
    row |= {"bytes": case.nbytes}
    return _rates(row | _samples(case.prepare, [case.source, case.target], budget))


def _launch_row(name: str, device: torch.device, budget: _Budget, *, host_only: bool) -> Row:
    row: Row = {"name": name, "launches": _LAUNCHES}
    return row | _samples(lambda: _launches(device), [device], budget, calls=_LAUNCHES, host_only=host_only)


def _launches(device: torch.device) -> Run:
    tiny = torch.zeros(1, device=device)

    def run() -> None:
        for _ in range(_LAUNCHES):
            tiny.add_(1.0)

    return run


def _samples(
    prepare: Callable[[], Run],
    devices: Iterable[torch.device | str],
    budget: _Budget,
    *,
    calls: int = 1,
    host_only: bool = False,
) -> Row:
    """Status, samples and spread of a case whose run makes ``calls`` calls."""
    accelerators = distinct_accelerators(devices)
    try:
        seconds = repeated(prepare(), lambda: synchronize(accelerators), budget.next(), host_only=host_only)
    except torch.OutOfMemoryError as error:
        return {"status": "oom", "reason": str(error).splitlines()[0]}
    finally:
        _release(accelerators)
    samples_us = [value * _US_PER_S / calls for value in seconds]
    return {"status": "ok", "samples_us": samples_us, "time_us": spread(samples_us)}


def _rates(row: Row) -> Row:
    """Achieved rates of a row that has samples: FLOP and bytes of one call over its time."""
    if row["status"] != "ok":
        return row
    times_s = [value / _US_PER_S for value in row["samples_us"]]
    row["achieved_gb_per_s"] = spread([row["bytes"] / _GIGA / value for value in times_s])
    if row.get("flop"):
        row["achieved_gflop_per_s"] = spread([row["flop"] / _GIGA / value for value in times_s])
    return row


def _classes(rows: Sequence[Row]) -> dict[str, Row]:
    """The spread of each class over the repeats of all its cases: FLOP rates, or bytes where nothing is computed."""
    found: dict[str, Row] = {}
    for name in KERNEL_CLASSES:
        members = [row for row in rows if row["class"] == name and row["status"] == "ok"]
        amount, key = ("bytes", "achieved_gb_per_s") if name == "memory_bound" else ("flop", "achieved_gflop_per_s")
        rates = [row[amount] / _GIGA / (value / _US_PER_S) for row in members for value in row["samples_us"]]
        found[name] = {"cases": len(members), **({key: spread(rates)} if rates else {})}
    return found


def _settings() -> Row:
    """What decides which kernels run."""
    return {
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "conv_fp32_precision": str(torch.backends.cudnn.conv.fp32_precision),  # type: ignore[attr-defined]  # made at run time
        "matmul_fp32_precision": str(torch.backends.cuda.matmul.fp32_precision),
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
    }


def _release(accelerators: list[torch.device]) -> None:
    """Give memory back before the next case needs it."""
    gc.collect()
    if accelerators:
        torch.accelerator.empty_cache()
