"""What each mechanism of the simulator is worth: the published cells again, with one mechanism at a time left out.

python -m studies.simulator.effects              prints the table
python -m studies.simulator.effects --write      writes it into effects.csv
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from math import sqrt
from pathlib import Path
from typing import Any, Final, TypeVar

from gpipe_bench.components import PUBLISHED
from gpipe_bench.errors import OutOfMemory
from gpipe_bench.machine.profile import HardwareMachine, Profile, load_profile
from gpipe_bench.models.table import parse_arguments
from gpipe_bench.simulator.published.settings import PublishedSetting, published_settings, published_value
from gpipe_bench.simulator.steps.run import Run, Settings, run
from gpipe_bench.simulator.steps.settings import enough_steps
from gpipe_bench.simulator.workloads.build import workload_of
from gpipe_bench.simulator.workloads.sources import model_of_suite
from gpipe_bench.simulator.workloads.workload import MemoryOp, TaskWork, Workload
from gpipe_bench.suite.published.simulations import published_cell
from gpipe_bench.util.files import write_files
from studies.simulator.fit import FITTED, with_shares

T = TypeVar("T")
Values = dict[str, float | None]

TABLE: Final = Path(__file__).with_name("effects.csv")

NOTHING: Final = "nothing: error of the simulator"
_THROUGHPUT: Final = "throughput_samples_per_s"
_RESERVED: Final = "peak_reserved_gib"
_CELLS: Final[Mapping[str, tuple[str, str, str]]] = {
    **{f"{name}_throughput_fraction": ("ablation", name, _THROUGHPUT) for name in PUBLISHED},
    "unet-pipeline-8_throughput_fraction": ("unet-speed", "pipeline-8", _THROUGHPUT),
    "amoebanet-d-n8m32_throughput_fraction": ("amoebanet-d-speed", "n8m32", _THROUGHPUT),
    **{f"{name}_memory_fraction": ("ablation", name, _RESERVED) for name in PUBLISHED},
}
"""Columns of the table: published cells."""


def _same(value: T) -> T:
    return value


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A mechanism, and how the simulator goes without it.

    Attributes:
        name: the mechanism that is left out; ``other value:`` for another value of an assumption.
        profile: what changes of the hardware.
        work: what changes of the work.
        settings: what changes of the run.
        metric: what is read instead of reserved memory.
    """

    name: str
    profile: Callable[[Profile], Profile] = _same
    work: Callable[[Workload], Workload] = _same
    settings: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "peak_reserved"


def _update(**values: object) -> Callable[[Profile], Profile]:
    return lambda profile: profile.model_copy(update=values)


def _links(way: str = "", times: float = 1.0, **values: float) -> Callable[[Profile], Profile]:
    """Other values, or times the latency, of all links or of the link of one way of the topology."""

    def changed(profile: Profile) -> Profile:
        links = dict(profile.links)
        for name in [getattr(profile.topology, way)] if way else profile.links:
            link = links[name]
            links[name] = link.model_copy(update={"latency_us": times * link.latency_us, **values})
        return profile.model_copy(update={"links": links})

    return changed


def _one_socket(profile: Profile) -> Profile:
    return profile.model_copy(update={"topology": profile.topology.model_copy(update={"group_size": 8})})


def _one_efficiency(profile: Profile) -> Profile:
    """One share of the peak for all that computes, between those of 3x3 convolutions and of matrix products."""
    both = profile.efficiency.conv3x3_stride1, profile.efficiency.other_conv_matmul
    return with_shares(profile, dict.fromkeys(FITTED, sqrt(both[0] * both[1])))


def _no_wide_filters(profile: Profile) -> Profile:
    """Wide filters are as fast as matrix products."""
    return with_shares(profile, {"spatial_conv": None})


def _tasks(change: Callable[[TaskWork], TaskWork]) -> Callable[[Workload], Workload]:
    """Other tasks."""

    def changed(work: Workload) -> Workload:
        parts = ({size: change(task) for size, task in part.items()} for part in work.partitions)
        return replace(work, partitions=tuple(parts))

    return changed


def scratch(factor: float) -> Callable[[Workload], Workload]:
    """Times as much scratch memory of kernels; with 0 they do not ask for any."""

    def scaled(rows: Sequence[MemoryOp]) -> tuple[MemoryOp, ...]:
        kept = (one for one in rows if factor or one.kind != "scratch")
        return tuple(one._replace(bytes=round(factor * one.bytes)) if one.kind == "scratch" else one for one in kept)

    def changed(part: Any) -> Any:
        memories = {name: scaled(getattr(part, name)) for name in part.__slots__ if name.endswith("_memory")}
        inner = {name: changed(getattr(part, name)) for name in ("checkpointed", "split") if getattr(part, name, None)}
        return replace(part, **memories, **inner)

    return _tasks(changed)


MECHANISMS: Final = (
    Mechanism("classes of kernels: one efficiency", _one_efficiency),
    Mechanism("class of wide filters: as matrix products", _no_wide_filters),
    Mechanism("time of copies", _links(gb_per_s=1e6, latency_us=0.0)),
    Mechanism("other value: links of 9 GB/s", _links("within", gb_per_s=9.0)),
    Mechanism("other value: links of 13 GB/s", _links("within", gb_per_s=13.0)),
    Mechanism("latency of links", _links(latency_us=0.0)),
    Mechanism("other value: twice the latency of links", _links(times=2.0)),
    Mechanism("second socket: one link for all", _one_socket),
    Mechanism("other value: 5 GB/s across sockets", _links("across", gb_per_s=5.0)),
    Mechanism("other value: 8 GB/s across sockets", _links("across", gb_per_s=8.0)),
    Mechanism("host time per kernel", _update(launch_us=0.0)),
    Mechanism("other value: 10 us of the host per kernel", _update(launch_us=10.0)),
    Mechanism("other value: 18 us of the host per kernel", _update(launch_us=18.0)),
    Mechanism("shortest kernel", _update(kernel_floor_us=0.0)),
    Mechanism("other value: 5 us for the shortest kernel", _update(kernel_floor_us=5.0)),
    Mechanism("limit of the launch queue", _update(queue_depth=10**9)),
    Mechanism("update of the parameters", work=lambda work: replace(work, optimizer=())),
    Mechanism("autograd of PyTorch 1.3: today's", settings={"flavour": "current"}),
    Mechanism("latency of a nested backward's root", settings={"nesting_ns": (50_000, 0)}),
    Mechanism("time to prepare a nested backward", settings={"nesting_ns": (0, 100_000)}),
    Mechanism("spread of the latency: always its mean", settings={"seed": None}),
    Mechanism("other value: 60 us until a root", settings={"nesting_ns": (50_000, 60_000)}),
    Mechanism("other value: 140 us until a root", settings={"nesting_ns": (50_000, 140_000)}),
    Mechanism("other value: latencies of a second seed", settings={"seed": 1}),
    Mechanism("other value: latencies of a third seed", settings={"seed": 2}),
    Mechanism("copies of gradients in a checkpoint", work=_tasks(lambda task: replace(task, checkpointed=None))),
    Mechanism("scratch memory of convolutions", work=scratch(0)),
    Mechanism("other value: half of the scratch memory", work=scratch(0.5)),
    Mechanism("other value: twice the scratch memory", work=scratch(2.0)),
    Mechanism("capacity of the devices", _update(memory_gib=1e4)),
    Mechanism("cache of the allocator: allocated bytes", metric="peak_allocated"),
)
"""In the order of the table."""


def effects(mechanisms: Sequence[Mechanism], profile: Profile) -> dict[str, Values]:
    """For the whole simulator, simulated over published minus 1; for each mechanism, without it over with it minus 1.

    Returns:
        name -> cell -> share; None where memory ran out.
    """
    whole = _values(Mechanism("nothing"), profile)
    published: Values = {name: published_value(_setting(cell), cell[2]) for name, cell in _CELLS.items()}
    found = {NOTHING: _over(whole, published)}
    return found | {one.name: _over(_values(one, profile), whole) for one in mechanisms}


def _setting(cell: tuple[str, str, str]) -> PublishedSetting:
    return next(row for row in published_settings() if (row.table, row.experiment) == cell[:2])


def _values(mechanism: Mechanism, profile: Profile) -> Values:
    known = {cell[:2]: _simulated(mechanism, _setting(cell), profile) for cell in _CELLS.values()}
    return {name: known[cell[:2]].get(cell[2]) for name, cell in _CELLS.items()}


def _simulated(mechanism: Mechanism, row: PublishedSetting, profile: Profile) -> Values:
    """Throughput of an epoch and reserved memory of a published row with a mechanism changed; nothing out of memory."""
    sizes = [(row.batch_size, row.full_steps), *([(row.rest_batch_size, 1)] if row.rest_batch_size else [])]
    try:
        runs = [_run(mechanism, row, profile, size) for size, _ in sizes]
    except OutOfMemory:
        return {}
    samples = sum(size * steps for size, steps in sizes)
    time_ns = sum(done.step_ns * steps for done, (_, steps) in zip(runs, sizes, strict=True))
    peaks = [getattr(one, mechanism.metric) for one in runs[0].memory]
    return {_THROUGHPUT: samples / time_ns * 1e9, _RESERVED: sum(peaks) / 2**30}


def _run(mechanism: Mechanism, row: PublishedSetting, profile: Profile, batch_size: int) -> Run:
    hardware, cell = mechanism.profile(profile), published_cell(row, batch_size)
    source = model_of_suite(row.model, parse_arguments(row.model, row.model_args))
    work = mechanism.work(
        workload_of(
            source,
            balance=row.layers,
            batch_size=batch_size,
            chunks=row.chunks,
            profile=hardware,
            optimizer=row.optimizer,
            published=True,
        )
    )
    settings = replace(Settings(cell.components, cell.checkpoint, "published"), **mechanism.settings)
    return run(work, HardwareMachine(hardware), replace(settings, steps=enough_steps(settings, work.m * work.n)))


def _over(values: Values, others: Values) -> Values:
    return {
        name: None if value is None or others[name] is None else value / (others[name] or 1.0) - 1
        for name, value in values.items()
    }


def table(found: Mapping[str, Values]) -> str:
    """The effects as CSV, a line per mechanism; a cell is empty where memory ran out."""
    file = StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["left_out", *_CELLS])
    for name, shares in found.items():
        writer.writerow([name, *("" if shares[cell] is None else f"{shares[cell]:.4f}" for cell in _CELLS)])
    return file.getvalue()


def main() -> None:
    """Make the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.simulator.effects", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--write", action="store_true", help=f"write it into {TABLE.name}")
    options = parser.parse_args()
    made = table(effects(MECHANISMS, load_profile("p40")))
    if options.write:
        write_files({TABLE: made})
    else:
        print(made, end="")


if __name__ == "__main__":
    main()
