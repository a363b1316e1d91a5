"""Contenders of several processes, timed from the first start to the last end.

``gpipe_bench.distributed`` and torch.distributed.pipelining have a process per device; ``loop-processes`` has one per
core, or device, that can be used.

    parent ── run 3 steps ──> rank 0 ── barrier ── step ── barrier ── step ...
                              rank 1 ── barrier ── step ── barrier ── step ...
    step time = latest end - earliest start; one clock, since all ranks run on this machine

The ranks are forks of a process that has loaded PyTorch and run nothing. On the CPU they talk by gloo over loopback,
on GPUs by NCCL.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from gpipe_bench.bench.peers.cases import PeerCase
from gpipe_bench.bench.peers.contenders import Contender
from gpipe_bench.bench.peers.live import peak_counter
from gpipe_bench.bench.peers.runners import CountedStep, TrainingStep, loop_step, recomputed, synchronize
from gpipe_bench.bench.peers.skips import make_stages
from gpipe_bench.bench.peers.workloads import Work, make_work
from gpipe_bench.bench.running.failures import status_of
from gpipe_bench.distributed import Pipe
from gpipe_bench.errors import UnsupportedError
from gpipe_bench.util.processes import Child

_TIMEOUT: Final = timedelta(seconds=60)
_LOOPBACK: Final = Path("/sys/class/net/lo")


class RankError(RuntimeError):
    """Ranks failed; the text is what each of them raised."""


class Ranks:
    """The ranks of a contender, as one runner.

    Args:
        contender: one with a process per device, whose option names the schedule, or one whose kind is ``loops``.
        case: what it runs.
        count: whether to count live bytes, which makes it slow.

    Raises:
        RankError: a rank could not be started.
        UnsupportedError: there are fewer GPUs than ranks.
    """

    def __init__(self, contender: Contender, case: PeerCase, *, count: bool) -> None:
        ranks = case.partitions if contender.process_per_device else case.loops
        if case.device != "cpu" and case.devices < ranks:
            raise UnsupportedError(
                f"{contender.name} must have a GPU for each of {ranks} ranks, got {case.devices}: NCCL "
                "refuses two ranks on one GPU; use fewer partitions"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = str(Path(self._folder.name) / "store")
        seats = [Seat(contender, case, rank, ranks, store, count) for rank in range(ranks)]
        self._ranks = [Child.start(_serve, seat) for seat in seats]
        try:
            self._answers()
        except RankError:
            self.close()
            raise

    def run(self, warmup: int, steps: int) -> tuple[list[float], list[float]]:
        """Seconds and CPU seconds of all ranks together, for ``steps`` steps after ``warmup`` that are not timed."""
        wall, cpu = [], []
        for ranks in zip(*self._ask("run", warmup, steps), strict=True):
            starts, ends, used = zip(*ranks, strict=True)
            wall.append(max(ends) - min(starts))
            cpu.append(sum(used))
        return wall, cpu

    def gradients(self) -> list[Tensor]:
        """The gradients that a step leaves, summed over ranks, on the CPU, in the order of the model's parameters."""
        parts = [[torch.from_numpy(gradient) for gradient in part] for part in self._ask("gradients")]
        return [torch.stack(shares).sum(0) for shares in zip(*parts, strict=True)]

    def forward_passes(self) -> float:
        """Of a step, per sample: one, and what checkpoints compute again."""
        shares: list[float] = self._ask("forward_passes")
        return sum(shares)

    def peak_bytes(self) -> int:
        """The sum over ranks of the most bytes of tensors that were alive at once."""
        return sum(self._ask("peak_bytes"))

    def close(self) -> None:
        """End the ranks, whatever they are doing."""
        for rank in self._ranks:
            rank.end()
        self._folder.cleanup()

    def _ask(self, *request: Any) -> list[Any]:
        for rank in self._ranks:
            rank.results.send(request)
        return self._answers()

    def _answers(self) -> list[Any]:
        """The answer of each rank; raises what all that failed say, since one that fails makes others fail."""
        answers, failures = [], []
        for number, rank in enumerate(self._ranks):
            try:
                failed, answer = rank.results.recv()
            except EOFError:
                failed, answer = True, "ended without an answer"
            if failed:
                failures.append(f"rank {number}: {answer}")
            answers.append(answer)
        if failures:
            raise RankError("; ".join(failures))
        return answers


def start_group(rank: int, count: int, store: str, device: str) -> None:
    """Join the ranks of this machine that share the file ``store``."""
    if _LOOPBACK.exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count, timeout=_TIMEOUT)


class Seat(NamedTuple):
    """What a rank is told.

    Attributes:
        contender: what all ranks are part of.
        case: what all ranks run.
        rank: 0-based.
        ranks: how many there are.
        store: file by which the ranks find each other.
        counted: whether to count live bytes.
    """

    contender: Contender
    case: PeerCase
    rank: int
    ranks: int
    store: str
    counted: bool

    @property
    def place(self) -> str:
        """The device of this rank."""
        places = self.case.placement()
        if not self.contender.process_per_device:
            places = sorted(set(places))
        return places[self.rank % len(places)]

    def own(self) -> list[int]:
        """Partitions of this rank: every so manieth, so that neighbours are on different ranks, or a V."""
        round_trip = (
            [*range(self.ranks), *reversed(range(self.ranks))] if self.contender.v_shaped else range(self.ranks)
        )
        return [j for j in range(len(self.case.balance)) if round_trip[j % len(round_trip)] == self.rank]


class _Rank(CountedStep):
    def __init__(self, seat: Seat) -> None:
        torch.set_num_threads(1)
        self._place = place = seat.place
        self.pieces = seat.case.chunks
        if place != "cpu":
            torch.accelerator.set_device_index(torch.device(place).index)
        self.peak = None
        make = {"distributed": self._distributed, "pipelining": self._pipelined, "loops": self._loop}
        self.step = make[seat.contender.kind](seat)
        # The first step agrees on shapes and opens connections.
        self.step()

    def _count(self, seat: Seat, held: Sequence[Tensor]) -> None:
        """Count from now on, and what this rank holds from the start; nothing of the other ranks."""
        if seat.counted:
            self.peak = peak_counter([seat.place])
            self.peak.hold(held)

    def _data(self, seat: Seat, work: Work) -> tuple[Tensor | None, Tensor | None]:
        """The batch in the rank of the first partition, the target in that of the last one."""
        own = seat.own()
        given = work.batch.to(seat.place) if 0 in own else None
        return given, work.target.to(seat.place) if len(seat.case.balance) - 1 in own else None

    def _loop(self, seat: Seat) -> TrainingStep:
        work = make_work(seat.case)
        self._count(seat, [*work.model.parameters(), work.batch, work.target])
        return loop_step(seat.case, work, seat.place, slice(seat.rank, None, seat.ranks))

    def _distributed(self, seat: Seat) -> TrainingStep:
        case, place = seat.case, seat.place
        work = make_work(case)
        pipe = Pipe(
            work.model,
            case.balance,
            schedule=seat.contender.option,
            device=place,
            chunks=case.chunks,
            checkpoint=case.checkpoint,
            timeout_s=_TIMEOUT.total_seconds(),
        )
        given, target = self._data(seat, work)
        self._count(seat, [*pipe.parameters(), *_present(given, target)])
        # Parameters of other ranks have no gradients here.
        return TrainingStep(
            list(work.model.parameters()), lambda: pipe.step(given, target, work.loss, reduction="mean"), [place]
        )

    def _pipelined(self, seat: Seat) -> TrainingStep:
        case, place = seat.case, seat.place
        work = make_work(case)
        stages = make_stages(work.model, case.balance, recomputed(case), sent=True)
        own = {j: stages[j].to(place) for j in seat.own()}
        given, target = self._data(seat, work)
        pieces = [PipelineStage(stage, j, len(stages), torch.device(place)) for j, stage in own.items()]
        schedule: Any = getattr(pipelining, seat.contender.option)
        plan = schedule(pieces if len(pieces) > 1 else pieces[0], case.chunks, loss_fn=work.loss)
        parameters = [parameter for stage in own.values() for parameter in stage.parameters()]
        self._count(seat, [*parameters, *_present(given, target)])
        entering = [] if given is None else [given]

        def step() -> None:
            for stage in own.values():
                stage.calls = 0
            plan.step(*entering, target=target, return_outputs=False)

        # Parameters of other ranks have no gradients here.
        return TrainingStep(list(work.model.parameters()), step, [place])

    def run(self, warmup: int, steps: int) -> list[tuple[float, float, float]]:
        for _ in range(warmup):
            self.step()
        found = []
        for _ in range(steps):
            dist.barrier()
            synchronize([self._place])
            start, used = time.perf_counter(), time.process_time()
            self.step()
            found.append((start, time.perf_counter(), time.process_time() - used))
        return found

    def gradients(self) -> list[Any]:
        self.step()
        return [gradient.cpu().numpy() for gradient in self.step.gradients()]


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _serve(pipe: Connection, seat: Seat) -> None:
    """Answer the parent until it goes away; a failure ends the rank, and with it the others, which wait for it."""
    with suppress(EOFError, BrokenPipeError):
        try:
            start_group(seat.rank, seat.ranks, seat.store, seat.case.device)
            server = _Rank(seat)
            pipe.send((False, None))
            while True:
                name, *arguments = pipe.recv()
                pipe.send((False, getattr(server, name)(*arguments)))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the peer raises becomes a row
            traceback.print_exc()
            pipe.send((True, status_of(error)[1]))
    os._exit(0)
