"""On one accelerator: which stream does what."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from tests.engine.support import Mix, Watch, grid
from tests.gpu.support import LATE_BALANCE, Streams, late_batch, late_model, placed

pytestmark = pytest.mark.gpu

M, N = 3, 4
COMPUTE = {"forward", "recompute", "backward"}


def watched_step(device, pipe=None, **options) -> Watch:
    pipe = placed(late_model(), LATE_BALANCE, [device], chunks=M, **options) if pipe is None else pipe
    with pipe.observe(watch := Watch()):
        pipe(late_batch(device, M)).sum().backward()
    return watch


def streams(watch: Watch, *, compute: bool) -> set[int]:
    return {seen.task.stream.stream_id for seen in watch.seen if (seen.task.kind in COMPUTE) == compute}


def test_with_host_transfer_every_partition_computes_on_a_stream_of_its_own(device):
    watch = watched_step(device, transfer="host", checkpoint="always")
    by_partition = [
        {seen.task.stream.stream_id for seen in watch.seen if seen.task.kind in COMPUTE and seen.task.partition == j}
        for j in range(N)
    ]
    assert [len(ids) for ids in by_partition] == [1] * N
    assert len(set.union(*by_partition)) == N


def test_pipelines_made_one_after_another_use_the_same_streams(device):
    steps = [watched_step(device, transfer="host", checkpoint="always") for _ in range(20)]
    used = [(streams(watch, compute=True), streams(watch, compute=False)) for watch in steps]
    assert used == used[:1] * 20


def test_copies_use_neither_compute_streams_nor_the_callers(device):
    watch = watched_step(device, transfer="host")
    copying = streams(watch, compute=False)
    assert copying
    assert not copying & streams(watch, compute=True)
    assert torch.accelerator.current_stream(device).stream_id not in copying
    assert {seen.task.lane for seen in watch.seen if seen.task.kind not in COMPUTE} == {"copy"}


def test_more_chunks_than_the_pool_has_streams_put_no_copy_on_a_compute_stream(device):
    chunks = 40
    pipe = placed(late_model(), LATE_BALANCE, [device], chunks=chunks, transfer="host")
    with pipe.observe(watch := Watch()):
        pipe(late_batch(device, chunks)).sum().backward()
    assert not streams(watch, compute=False) & streams(watch, compute=True)


def test_every_microbatch_and_receiver_has_a_copy_stream_of_its_own(device):
    watch = watched_step(device, transfer="host")
    arriving = {seen.name: seen.task.end_stream.stream_id for seen in watch.seen if seen.task.kind == "copy"}
    assert sorted(arriving) == sorted(grid("C", range(M), range(1, N)))
    assert len(set(arriving.values())) == len(arriving)


def test_without_copy_streams_copies_run_where_their_sender_and_receiver_compute(device):
    watch = watched_step(device, transfer="host", components=Components(copy_streams=False))
    computing = {seen.task.partition: seen.task.stream for seen in watch.seen if seen.task.kind == "forward"}
    copies = [seen for seen in watch.seen if seen.task.kind == "copy"]
    assert copies
    for seen in copies:
        assert seen.task.stream == computing[seen.task.partition - 1]
        assert seen.task.end_stream == computing[seen.task.partition]
        assert seen.task.lane == "compute"


def test_a_second_step_uses_the_same_streams(device):
    pipe = placed(late_model(), LATE_BALANCE, [device], chunks=M, transfer="host")
    first, second = (watched_step(device, pipe) for _ in range(2))
    assert {seen.name: seen.task.stream for seen in first.seen} == {seen.name: seen.task.stream for seen in second.seen}


def test_with_direct_transfer_everything_computes_on_the_callers_stream_and_nothing_is_copied(device):
    watch = watched_step(device, transfer="direct")
    assert streams(watch, compute=True) == {torch.accelerator.current_stream(device).stream_id}
    assert watch.names("CcPp") == []


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("clock_cycle", [True, False])
def test_layers_run_on_the_compute_stream_of_their_partition(device, transfer, clock_cycle):
    """First pass, recomputation and backward pass: in workers and in autograd's threads."""
    layers = [Streams(), Streams(), Streams()]
    pipe = placed(
        nn.Sequential(*layers), [1, 1, 1], [device], chunks=M, transfer=transfer, checkpoint="always",
        components=Components(clock_cycle=clock_cycle),
    )  # fmt: skip
    with pipe.observe(watch := Watch()):
        pipe(torch.ones(M, 3, device=device)).sum().backward()
    for j, layer in enumerate(layers):
        computing = {seen.task.stream.stream_id for seen in watch.seen if seen.name.startswith("F") and
                     seen.task.partition == j}  # fmt: skip
        assert layer.seen == {"first": computing, "again": computing, "backward": computing}


def test_the_callers_stream_and_device_are_left_alone(device):
    before = torch.accelerator.current_stream(device), torch.accelerator.current_device_index()
    watched_step(device, transfer="host")
    assert (torch.accelerator.current_stream(device), torch.accelerator.current_device_index()) == before


def test_one_thread_issues_the_tasks_of_one_device(device):
    watch = watched_step(device, transfer="host")
    assert len({seen.thread for seen in watch.seen if seen.task.kind == "forward"}) == 1


@pytest.mark.parametrize("transfer", ["direct", "host"])
def test_every_task_is_seen_once(device, transfer):
    watch = watched_step(device, transfer=transfer)
    expected = grid("F", range(M), range(N)) + grid("B", range(M), range(N)) + grid("R", range(M - 1), range(N))
    if transfer == "host":
        expected += [name for letter in "Cc" for name in grid(letter, range(M), range(1, N))]
        expected += [name for letter in "Pp" for name in grid(letter, range(M), [2, 3])]
    assert watch.names() == sorted(expected)


def test_more_microbatches_than_the_pool_has_streams(device):
    """The pool has 32; more chunks share them, and results stay right."""
    pipe = placed(nn.Sequential(Mix(), Mix()), [1, 1], [device], chunks=40, transfer="host")
    x = torch.ones(40, 3, device=device)
    torch.testing.assert_close(pipe(x), nn.Sequential(*pipe)(x))
