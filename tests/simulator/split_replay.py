"""Live bytes of a split schedule: what the engine holds on the CPU, and what the requests of I and W say."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gpipe_bench import GPipe
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.measure.memory import LiveBytes
from gpipe_bench.schedules import Action, check, named_schedule, with_recomputation
from gpipe_bench.schedules.cycles import checkpoint_stop
from gpipe_bench.simulator.workloads.build import build_workload
from gpipe_bench.simulator.workloads.workload import MemoryOp, TaskWork, Workload, gradient_name, input_name
from studies.simulator.effects import scratch
from tests.engine.steps import DOUBLE
from tests.simulator.test_live_bytes import Loss

NAMES = {"forward": "F", "recompute": "R", "backward_inputs": "I", "backward_weights": "W"}


Points = dict[str, tuple[int, int]]
"""By action: live bytes when it begins, and the most until it ends; parameters, their gradients and the batch aside."""


class Watching(LiveBytes):
    """Notes live bytes for each task."""

    def __init__(self, pipe: Any, x: Any) -> None:
        super().__init__(pipe)
        self.points: Points = {}
        self._ledger.enter([x], 0)
        self.static = -1

    def start(self, task: Any) -> Any:
        begin = sum(self.live_bytes)
        self.static = begin if self.static < 0 else self.static
        # What is freed until now makes no peak.
        self._ledger._peak_total = 0
        return super().start(task), begin

    def finish(self, token: Any, nbytes: int) -> None:
        running, begin = token
        peak = max(begin, self.peak_total_bytes)
        super().finish(running, nbytes)
        task = running.task
        self.points[f"{NAMES[task.kind]}{task.microbatch},{task.partition}"] = begin - self.static, peak - self.static


def loss(output: Any, _target: Any) -> Any:
    """A number that keeps every output."""
    values = output if isinstance(output, tuple) else (output,)
    return sum(Loss.apply(value) for value in values)


def rows(balance: Sequence[int], schedule: str) -> int:
    """Devices of a schedule."""
    return len(balance) // 2 if schedule in DOUBLE else len(balance)


def engine_points(module: Any, x: Any, balance: Sequence[int], options: dict[str, Any]) -> Points:
    """Of a second step, for which gradients are there."""
    devices = ["cpu"] * rows(balance, options["schedule"])
    pipe = GPipe(copy.deepcopy(module), list(balance), devices=devices, workers="never", **options)
    target = torch.zeros(len(x))
    pipe.step(x, target, loss)
    with Watching(pipe, x) as live, pipe.observe(live):
        pipe.step(x, target, loss)
    return live.points


@dataclass
class Storage:
    nbytes: int
    holders: int = 1


@dataclass
class Replay:
    """All partitions on one device, which runs one action after the other; transfers copy nothing."""

    work: Workload
    live: int = 0
    most: int = 0
    points: Points = field(default_factory=dict)
    # By task what it holds, by name.
    tables: dict[tuple[int, int], dict[int, Storage]] = field(default_factory=dict)
    # What was sent, by direction, micro-batch and partition or skip.
    boxes: dict[tuple[Any, ...], list[Storage | None]] = field(default_factory=dict)

    def new(self, nbytes: int) -> Storage:
        self.live += nbytes
        self.most = max(self.most, self.live)
        return Storage(nbytes)

    def drop(self, storage: Storage | None) -> None:
        if storage is not None:
            storage.holders -= 1
            assert storage.holders >= 0
            self.live -= 0 if storage.holders else storage.nbytes

    def ops(self, ops: Sequence[MemoryOp], table: dict[int, Storage], later: Collection[int] = ()) -> None:
        """Carry out requests; frees of ``later`` names are left to the end."""
        late = []
        for op in ops:
            if op.kind == "alloc":
                assert op.block not in table
                table[op.block] = self.new(op.bytes)
            elif op.block in later:
                late.append(op.block)
            else:
                self.drop(table.pop(op.block))
        for name in late:
            self.drop(table.pop(name))

    def run(self, order: Sequence[Action], checkpointed: int) -> Points:
        for kind, i, j in order:
            work = self.work.task(i, j)
            if kind == "F":
                self.forward(i, j, work, checkpoint=i < checkpointed)
            elif kind == "R":
                self.again(i, j, work)
            elif kind == "I":
                self.inputs(i, j, work)
            else:
                self.weights(i, j, work)
        return self.points

    @contextmanager
    def observed(self, action: str) -> Iterator[None]:
        begin = self.most = self.live
        yield
        self.points[action] = begin, self.most

    def skips(self, j: int, *, out: bool) -> list[int]:
        return [k for k, skip in enumerate(self.work.skips) if (skip.source if out else skip.target) == j]

    def forward(self, i: int, j: int, work: TaskWork, *, checkpoint: bool) -> None:
        arrived = self.boxes.pop(("F", i, j), [Storage(0) for _ in work.input_bytes])
        arrived += [storage for k in self.skips(j, out=False) for storage in self.boxes.pop(("skip", i, k))]
        table = {input_name(place): storage for place, storage in enumerate(arrived)}
        inputs = dict(table)
        if checkpoint:
            for storage in inputs.values():
                storage.holders += 1
        with self.observed(f"F{i},{j}"):
            self.ops(work.forward_memory if checkpoint else work.graph_memory, table)
            sent = self.send(i, j, work, table)
        kept = set() if checkpoint else freed_later(work)
        for name in [name for name in table if name not in kept]:
            self.drop(table.pop(name))
        self.tables[i, j] = inputs if checkpoint else table
        if j == self.work.n - 1:
            self.boxes["loss", i] = sent

    def send(self, i: int, j: int, work: TaskWork, table: dict[int, Storage]) -> list[Storage | None]:
        """Outputs, each held once more."""
        sizes = [*work.output_bytes, *(self.work.skips[k].bytes[self.size(i)] for k in self.skips(j, out=True))]
        sent = []
        for place, nbytes in enumerate(sizes):
            storage = table.get((work.leaving or [-1] * len(sizes))[place])
            if storage is None:
                storage = self.new(nbytes)
            else:
                storage.holders += 1
            sent.append(storage)
        count = len(work.output_bytes)
        self.boxes["F", i, j + 1] = sent[:count]
        for k, storage in zip(self.skips(j, out=True), sent[count:], strict=True):
            self.boxes["skip", i, k] = [storage]
        return sent

    def size(self, i: int) -> int:
        return self.work.microbatch_sizes[i]

    def hands_over(self, i: int, j: int) -> bool:
        """Whether a task gets the only reference to the gradient of its output."""
        return self.work.needing_gradients(j, self.size(i)) == 1

    def again(self, i: int, j: int, work: TaskWork) -> None:
        table = self.tables[i, j]
        with self.observed(f"R{i},{j}"):
            self.ops(work.graph_memory, table)
        for name in [name for name in table if name not in freed_later(work)]:
            self.drop(table.pop(name))

    def inputs(self, i: int, j: int, work: TaskWork) -> None:
        table, split = self.tables[i, j], work.split
        if j == self.work.n - 1:
            grads = [self.new(storage.nbytes) for storage in self.boxes.pop(("loss", i))]
            for storage in self.boxes.pop(("F", i, j + 1)):
                self.drop(storage)
        else:
            grads = self.boxes.pop(("B", i, j))
        grads = [*grads, *(self.boxes.pop(("skip back", i, k))[0] for k in self.skips(j, out=True))]
        given = {gradient_name(place): grad for place, grad in enumerate(grads) if grad is not None}
        table |= given
        with self.observed(f"I{i},{j}"):
            self.ops(split.inputs_memory, table, () if self.hands_over(i, j) else given)
        self.send_back(i, j, work, table)
        left = {op.block for op in split.weights_memory if op.kind not in {"alloc", "scratch"}}
        for name in [name for name in table if name not in left]:
            self.drop(table.pop(name))

    def send_back(self, i: int, j: int, work: TaskWork, table: dict[int, Storage]) -> None:
        popped = self.skips(j, out=False)
        names = work.split.returning or (-1,) * (len(work.input_bytes) + len(popped))
        found = [None if name == -1 else table[name] for name in names]
        for storage in found:
            if storage is not None:
                storage.holders += 1
        if j:
            self.boxes["B", i, j - 1] = found[: len(work.input_bytes)]
        for k, storage in zip(popped, found[len(work.input_bytes) :], strict=True):
            self.boxes["skip back", i, k] = [storage]

    def weights(self, i: int, j: int, work: TaskWork) -> None:
        table = self.tables.pop((i, j))
        given = [name for name in table if name < -1 and name % 2]
        with self.observed(f"W{i},{j}"):
            self.ops(work.split.weights_memory, table, () if self.hands_over(i, j) else given)
        assert not table


def freed_later(work: TaskWork) -> set[int]:
    split = work.split
    ops = (*split.inputs_memory, *split.weights_memory)
    return {op.block for op in ops if op.kind not in {"alloc", "scratch"}} - {
        op.block for op in ops if op.kind == "alloc"
    }


def replayed_points(
    module: Any, x: Any, balance: Sequence[int], *, chunks: int, schedule: str, checkpoint: str
) -> Points:
    """What the requests say, of a step for which gradients are there."""
    work = build_workload(
        module,
        balance=balance,
        batch_size=len(x),
        chunks=chunks,
        profile=load_profile("p40"),
        sample=x,
        optimizer=None,
        split=True,
        # The mode that watches the engine keeps autograd from adding up in place.
        published=True,
    )
    m, n = work.m, work.n
    checkpointed = checkpoint_stop(checkpoint, m)
    order = with_recomputation(named_schedule(schedule, m, n, rows(balance, schedule)), checkpointed)
    replay = Replay(scratch(0)(work).chosen(checkpointed))
    return replay.run(check(order).order, checkpointed)
