"""Across processes, too, all that a layer's code sees and leaves is what it is in the plain module.

The models and the ledger are those of ``tests/engine/random_layers.py``. Ranks are threads, or processes over gloo:
there layers may draw random numbers, and be parallel over a mesh of pipelines and tensors.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gpipe_bench.distributed import Pipe
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.table import device_count
from tests.distributed.ranks import run_processes
from tests.distributed.virtual import results_of
from tests.engine.random_layers import DRAWING, KINDS, SKIPS, WIDTH, Layer, Ledger, random_model, small
from tests.engine.steps import DOUBLE
from tests.engine.support import MODES
from tests.engine.test_random_layers import Case, Found, squares, trained

MODELS = int(os.environ.get("RANDOM_MODELS", "1"))
"""Models for each schedule and checkpoint mode."""
SIZE = 2
QUIET = tuple(kind for kind in (*KINDS, *SKIPS) if kind not in DRAWING)
"""Kinds that draw no random numbers."""

# PyTorch's own, where a layer with a full backward hook gets no gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


def cases(kinds: tuple[str, ...], schedules: tuple[str, ...], modes: tuple[str, ...], models: int) -> list[Case]:
    """Models of three to six of ``kinds``."""
    found = []
    for schedule in schedules:
        for checkpoint in modes:
            for number in range(models):
                draw = random.Random(crc32(f"{schedule} {checkpoint} {number} {kinds}".encode()))
                found.append(Case(tuple(draw.sample(kinds, draw.randint(3, 6))), schedule, checkpoint, number))
    return found


def one_rank(case: Case, model: nn.Sequential, ledger: Ledger, balance: list[int], **options: Any) -> Found:
    """What one rank finds."""
    pipe = Pipe(model, balance, schedule=case.schedule, chunks=case.chunks, checkpoint=case.checkpoint, **options)

    def step(pipe: nn.Module, batch: Tensor, target: Tensor) -> Tensor:
        return pipe.step(batch, target, squares, reduction="sum")

    try:
        return trained(pipe, ledger, *case.batch(), step, nn.Module.__call__ if case.draws else None)
    finally:
        pipe.close()


def merged(results: list[Found]) -> Found:
    """What all ranks found; only the first partition gives a gradient of the batch."""
    first, *others = results
    for other in others:
        assert other.losses == first.losses
        first.gradients = {**other.gradients, **first.gradients}
        first.ledger.add(other.ledger)
    return first


@contextmanager
def naming(case: Case) -> Iterator[None]:
    """Errors say which case it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {case}")
        raise


def in_threads(case: Case) -> list[Found]:
    # Made in one thread: they draw their weights from the default generator.
    ledgers = [Ledger() for _ in range(4)]
    models = [case.model(ledger) for ledger in ledgers]
    balance = case.balance(len(models[0]))

    def job(group: Any) -> Found:
        return one_rank(case, models[group.rank()], ledgers[group.rank()], balance, group=group)

    return results_of(device_count(case.schedule, len(balance)), job)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_that_are_threads(schedule):
    """They share the default generator, so nothing draws."""
    for case in cases(QUIET, (schedule,), MODES, 2 * MODELS):
        with naming(case):
            case.check(merged(in_threads(case)))


def found_by(ranks: int, folder: Any, job: Any, drawn: list[Case]) -> Iterator[tuple[Case, list[Found]]]:
    """Each case, and what each process found."""
    results = run_processes(ranks, folder, job, drawn)
    failed = {rank: result for rank, result in enumerate(results) if not isinstance(result, list)}
    assert not failed, failed
    for case, *found in zip(drawn, *results, strict=True):
        yield case, found


def balance_of(case: Case, count: int) -> list[int]:
    """For two processes."""
    partitions = SIZE * (1 + (case.schedule in DOUBLE))
    cuts = sorted(random.Random(case.seed).sample(range(1, count), partitions - 1))
    return [end - start for start, end in zip([0, *cuts], [*cuts, count], strict=True)]


def in_processes(rank: int, drawn: list[Case]) -> list[Found]:
    found = []
    for case in drawn:
        ledger = Ledger()
        model = case.model(ledger)
        # Only the first process has the seed of the numbers.
        torch.manual_seed(case.seed + 1 + rank)
        with naming(case):
            found.append(one_rank(case, model, ledger, balance_of(case, len(model))))
    return found


def test_two_processes(tmp_path):
    drawn = cases((*KINDS, *SKIPS), SCHEDULES, ("always", "never"), MODELS)
    drawn += cases(DRAWING, ("1f1b", "zb_h1", "zb_v"), ("always", "except_last"), MODELS)
    for case, results in found_by(SIZE, tmp_path, in_processes, drawn):
        with naming(case):
            case.check(merged(results))


# --- tensor-parallel layers ------------------------------------------------------------------------------------------


class Parallel(Layer):
    """Two linear layers, of which each process has a half of the columns, then of the rows."""

    def make(self, draw: random.Random, rows: int) -> None:
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        for linear in (self.up, self.down):
            linear.weight = nn.Parameter(torch.randint(-1, 2, linear.weight.shape).double())

    def run(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(small(x))))


def parallel_model(case: Case, ledger: Ledger, mesh: DeviceMesh | None = None) -> nn.Sequential:
    """Random layers, and parallel ones among them, also at the ends of partitions; without a mesh they are whole."""
    model = random_model(case.kinds, case.seed, case.rows, ledger)
    draw = random.Random(case.seed)
    for number in range(4):
        layer = Parallel(f"parallel {number}", ledger, draw, case.rows)
        model.insert(draw.randrange(len(model) + 1), layer)
        if mesh is not None:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def in_a_mesh(rank: int, drawn: list[Case]) -> list[Found]:
    mesh, results = init_device_mesh("cpu", (SIZE, 2), mesh_dim_names=("pipeline", "tensor")), []
    for case in drawn:
        ledger = Ledger()
        model = parallel_model(case, ledger, mesh["tensor"])
        found = one_rank(case, model, ledger, balance_of(case, len(model)), mesh=mesh["pipeline"])
        found.gradients = {
            name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.gradients.items()
        }
        results.append(found)
    return results


def test_tensor_parallel_layers_in_four_processes(tmp_path):
    drawn = cases(QUIET, ("gpipe", "1f1b", "zb_h1", "zb_v"), ("always", "never"), MODELS)
    for case, results in found_by(2 * SIZE, tmp_path, in_a_mesh, drawn):
        for tensor in (0, 1):
            # In both processes of a partition the code of layers sees the same.
            ledger = Ledger()
            with naming(case):
                case.compare(merged(results[tensor::2]), case.alone(parallel_model(case, ledger), ledger))
