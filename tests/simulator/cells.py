"""Durations and peaks of some cells, a row each, in ``cells.csv``: the effect of a change of the simulator is a diff.

python -m tests.simulator.cells            writes the results of all rows anew; a new row needs its settings alone
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from gpipe_bench.components import Components
from gpipe_bench.errors import OutOfMemory
from gpipe_bench.machine.profile import HardwareMachine, load_profile
from gpipe_bench.machine.replay import Machine
from gpipe_bench.simulator.steps.run import Settings, run
from gpipe_bench.simulator.workloads.build import build_workload
from gpipe_bench.simulator.workloads.workload import (
    HOST,
    Kernels,
    MemoryOp,
    SkipWork,
    SplitWork,
    StaticMemory,
    TaskWork,
    Workload,
    gradient_name,
    input_name,
)
from gpipe_bench.step.request import Model

TABLE = Path(__file__).with_name("cells.csv")
SETTINGS = ("work", "chunks", "variant", "checkpoint", "schedule", "transfer", "devices", "other")
RESULTS = ("first_step_s", "all_steps_s", "peak_live_bytes", "peak_reserved_bytes")
MIB = 2**20
US = 1000
SKIPS = ((0, 3), (1, 2), (1, 4), (3, 4))


@dataclass(frozen=True)
class Wires:
    """Links of 10 GB/s, 8 to lower devices, 5 to the host, 7 from it; hosts of two devices may have one card."""

    launch_ns: int = 10 * US
    lock_permille: int = 0
    queue_depth: int = 1024
    capacity_bytes: int = 0
    cards: bool = False

    def copy_ns(self, source: int, target: int, nbytes: int) -> int:
        slower = 20 if target == HOST else 14 if source == HOST else 12 if target < source else 10
        return 5 * US + slower * nbytes // 100

    def buses(self, source: int, target: int) -> tuple[tuple[int, int], ...]:
        one, other = source // 2, target // 2
        return ((one, -1), (-1, other)) if self.cards and one != other else ()


def alloc(block: int, mib: float) -> MemoryOp:
    return MemoryOp("alloc", block, int(mib * MIB))


def free(block: int) -> MemoryOp:
    return MemoryOp("free", block)


def stage(j: int, **options: Any) -> TaskWork:
    """Its graph keeps a large block, its input and its output; its parameters get a gradient and a view of one."""
    times = 700 + 410 * (5 * j % 7), 1500 + 730 * (3 * j % 5)
    forward, backward = Kernels(times[0] * US, 8 + 3 * j), Kernels(times[1] * US, 16 + 6 * j)
    again = Kernels(forward.duration_ns + 130 * US, forward.launches + 1)
    graph = (alloc(0, 20 + 4 * (j % 3)), MemoryOp("scratch", 7, 24 * MIB), alloc(1, 2))
    gradients = (alloc(2, 5), alloc(3, 0.001))
    made = (MemoryOp("gradient", 2), MemoryOp("view", 3))
    gone = (free(0), free(1), free(input_name(0)), free(gradient_name(0)))
    split = SplitWork(
        Kernels(backward.duration_ns * 3 // 5, 9 + 3 * j),
        Kernels(backward.duration_ns * 2 // 5, 7 + 3 * j),
        inputs_memory=(alloc(4, 3), free(1), alloc(5, 2)),
        weights_memory=(*gradients, free(0), free(5), free(input_name(0)), free(gradient_name(0)), *made),
        returning=(5,) if j else (),
    )
    fields: dict[str, Any] = {
        "forward_memory": (*graph, free(0)),
        "graph_memory": graph,
        "backward_memory": (alloc(4, 3), *gradients, *gone, free(4), *made),
        "leaving": (1,),
        "input_bytes": (2 * MIB,),
        "output_bytes": (2 * MIB,),
        "nodes": 3,
        "split": split,
    }
    return TaskWork(forward, again, backward, **{**fields, **options})


def of(stages: list[TaskWork], m: int, **options: Any) -> Workload:
    """m micro-batches, of which the last is smaller and takes half as long."""

    def less(kernels: Kernels) -> Kernels:
        return replace(kernels, duration_ns=kernels.duration_ns // 2)

    parts = tuple(
        {2: one, 1: replace(one, forward=less(one.forward), recompute=less(one.recompute), backward=less(one.backward))}
        for one in stages
    )
    n = len(stages)
    fields: dict[str, Any] = {
        "loss": Kernels(300 * US, 6),
        "optimizer": tuple(Kernels((200 + 30 * j) * US, 4 + j) for j in range(n)),
        "static": tuple(
            StaticMemory((5 * MIB, 600), 5 * MIB + 1700, (5 * MIB, 600), ((1 + j) * MIB,)) for j in range(n)
        ),
        "loss_memory": (alloc(0, m * 2), alloc(gradient_name(0), m * 2), free(input_name(0)), free(0)),
    }
    return Workload(parts, (*(2,) * (m - 1), 1), **{**fields, **options})


def chain(m: int, n: int = 4) -> Workload:
    return of([stage(j) for j in range(n)], m)


def skips(m: int) -> Workload:
    """Two tensors cross each boundary; skips are tensors of their own, and one has no gradient."""
    border = (2 * MIB, 700)
    names = {"leaving": (), "split": None, "input_bytes": border, "output_bytes": border}
    ways = tuple(
        SkipWork(f"s{number}", *way, {1: MIB + number, 2: 3 * MIB + 512 * number}, returns=number != 2)
        for number, way in enumerate(SKIPS)
    )
    return of([stage(j, **names) for j in range(5)], m, skips=ways, loss_memory=())


def frozen(m: int) -> Workload:
    """The first partition learns nothing, so that no gradient goes back to it; the second needs its input no longer.

    The third passes its input on.
    """
    first = stage(0, learns=False, graph_memory=stage(0).forward_memory, backward_memory=(), split=None)
    needed = tuple(op for op in stage(1).backward_memory if op.block != input_name(0))
    second = stage(1, returns=(False,), backward_memory=needed, split=None)
    rows = (alloc(0, 20), free(0))
    third = stage(
        2, leaving=(input_name(0),), returning=(gradient_name(0),), forward_memory=rows, graph_memory=rows[:1],
        backward_memory=(free(0), free(gradient_name(0))), split=None,
    )  # fmt: skip
    return of([first, second, third, stage(3, split=None)], m)


def copying(m: int) -> Workload:
    """With a checkpoint tasks copy their input, which takes time and memory."""
    stages = [stage(j) for j in range(3)]
    copies = [
        replace(
            one, forward=Kernels(one.forward.duration_ns + 90 * US, 20), graph_memory=(alloc(9, 2), *one.graph_memory)
        )
        for one in stages
    ]
    return of([replace(one, checkpointed=other) for one, other in zip(stages, copies, strict=True)], m)


WORKS: Mapping[str, Callable[[int], Workload]] = {
    "chain": chain,
    "long chain": lambda m: chain(m, 8),
    "skips": skips,
    "frozen": frozen,
    "copying": copying,
}
MODELS: Mapping[str, tuple[Model, list[int], int]] = {
    "unet": (Model("unet", {"depth": 2, "B": 1, "C": 32, "size": 64}), [7, 8, 7, 7], 60),
    "vit": (Model("vit", {"L": 2, "D": 64, "heads": 2, "size": 56}), [3, 3], 48),
    "gpt2": (Model("gpt2", {"L": 2, "D": 64, "heads": 2, "context": 32}), [3, 3], 21),
}
"""Models of the suite on P40s, with their balances and batch sizes."""


@cache
def traced(name: str, m: int) -> Workload:
    model, balance, batch = MODELS[name]
    return build_workload(
        model, balance=balance, batch_size=batch, chunks=m, profile=load_profile("p40"), optimizer="adam", split=True
    )


def results(row: Mapping[str, str]) -> dict[str, str]:
    """What the settings of a row give."""
    other = dict(word.split("=") for word in row["other"].split())
    settings: dict[str, Any] = {
        "components": Components.from_label(row["variant"]),
        "checkpoint": row["checkpoint"],
        "schedule": row["schedule"] or None,
        "transfer": row["transfer"],
        "devices": tuple(map(int, row["devices"].split("-"))) if row["devices"] else (),
        "flavour": other.pop("flavour", "current"),
        "steps": int(other.pop("steps", 2)),
    }
    settings |= {name: other.pop(name) != "no" for name in ("streams", "workers") if name in other}
    given = {name: int(value) for name, value in other.items()}
    given["capacity_bytes"] = given.pop("capacity_mib", 0) * MIB
    machine: Machine = Wires(**given)
    if row["work"] in MODELS:
        work, machine = traced(row["work"], int(row["chunks"])), HardwareMachine(load_profile("p40"))
    else:
        work = WORKS[row["work"]](int(row["chunks"]))
    try:
        done = run(work, machine, Settings(**settings))
    except OutOfMemory as error:
        return dict.fromkeys(RESULTS, "") | {"peak_reserved_bytes": f"device {error.device} needs {error.needed} more"}
    return {
        "first_step_s": f"{done.step_ends_ns[0] / 1e9:.9f}",
        "all_steps_s": f"{done.makespan_ns / 1e9:.9f}",
        "peak_live_bytes": " ".join(map(str, done.peak_live_bytes)),
        "peak_reserved_bytes": " ".join(map(str, done.peak_reserved_bytes)),
    }


def rows() -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(TABLE.read_text())))


def name_of(row: Mapping[str, str]) -> str:
    return " ".join(row[column] for column in SETTINGS if row[column])


def written(found: Iterator[dict[str, str]]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, SETTINGS + RESULTS, lineterminator="\n")
    table.writeheader()
    table.writerows(found)
    return text.getvalue()


if __name__ == "__main__":
    TABLE.write_text(written({**row, **results(row)} for row in rows()))
    sys.stdout.write(f"{TABLE}: {len(rows())} rows\n")
