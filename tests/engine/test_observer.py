"""An observer sees every task once, with its micro-batch, partition and bytes; without one nothing is different."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import Components
from gpipe_bench.results.timeline import COMPUTE_KINDS, KINDS
from gpipe_bench.schedules import SCHEDULES, named_schedule
from gpipe_bench.schedules.table import LOOP
from tests.engine.steps import DOUBLE, mean_loss, samples, scheduled, targets
from tests.engine.support import (
    FACTORIAL,
    MODES,
    SOME,
    Mix,
    Pop,
    Stash,
    Watch,
    grid,
    label,
    numbered,
    on_cpu,
    probe_pipe,
)

every_combination = pytest.mark.parametrize("components", SOME, ids=label)
M, N, ROWS = 3, 3, 2
# float64: the main tensor has 3 columns, and so has the skip; micro-batches have 2, 2 and 1 rows
ROW = 3 * 8


def skip_pipe(**options):
    """One skip from partition 0 to 2; the first partition takes integers."""
    layers = nn.Sequential(nn.Embedding(5, 3), Stash(), Mix(), Pop(), Mix()).double()
    return on_cpu(layers, [2, 1, 2], chunks=M, **options)


def batch() -> Tensor:
    return torch.arange(5)


def watched_step(pipe, x=None, *, backward=True) -> Watch:
    with pipe.observe(watch := Watch()):
        output = pipe(batch() if x is None else x)
        if backward:
            output.sum().backward()
    return watch


def expected(components: Components, checkpoint: str, transfer: str) -> list[str]:
    """The names of all tasks of a step."""
    recomputed = {"always": M, "except_last": M - 1, "never": 0}[checkpoint]
    names = grid("F", range(M), range(N)) + grid("B", range(M), range(N)) + grid("R", range(recomputed), range(N))
    if transfer == "host":
        names += grid("C", range(M), range(1, N)) + grid("c", range(M), range(1, N))
        if components.portals:
            names += grid("P", range(M), [N - 1]) + grid("p", range(M), [N - 1])
    return sorted(names)


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("components", FACTORIAL, ids=label)
def test_every_task_of_a_step_is_seen_once(components, checkpoint, transfer):
    watch = watched_step(skip_pipe(components=components, checkpoint=checkpoint, transfer=transfer))
    assert watch.names() == expected(components, checkpoint, transfer)
    assert all(seen.finished for seen in watch.seen)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", MODES)
def test_every_task_of_a_schedule_is_seen_once(schedule, checkpoint):
    layers = nn.Sequential(*(Mix() for _ in range(4))).double()
    pipe = scheduled(layers, [1] * 4, schedule, chunks=M, checkpoint=checkpoint, transfer="host")
    with pipe.observe(watch := Watch()):
        pipe.step(samples(7, 3), targets(7), mean_loss)
    recomputed = {"always": M, "except_last": M - 1, "never": 0}[checkpoint]
    actions = named_schedule(schedule, M, 4, 2 if schedule in DOUBLE else 4)
    whole = [*grid("R", range(recomputed), range(4)), *(f"{kind}{i},{j}" for kind, i, j in actions)]
    assert watch.names("FRBIW") == sorted(whole)
    # the turning point of a V is within a device
    crossed = [1, 3] if schedule in DOUBLE and schedule not in LOOP else [1, 2, 3]
    assert watch.names("Cc") == sorted([*grid("C", range(M), crossed), *grid("c", range(M), crossed)])
    assert {seen.finished for seen in watch.seen} == {1}


@every_combination
def test_bytes(components):
    watch = watched_step(skip_pipe(components=components, checkpoint="always", transfer="host"))
    rows = [2, 2, 1]
    riding = 0 if components.portals else 1
    for i in range(M):
        row = rows[i] * ROW
        # a result is the main tensor and the skips that leave the task
        leaving = [2, 1 + riding, 1]
        for letter in "FR":
            assert [watch.nbytes(f"{letter}{i},{j}") for j in range(N)] == [row * count for count in leaving]
        assert [watch.nbytes(f"B{i},{j}") for j in range(N)] == [0] * N
        for letter in "Cc":
            assert [watch.nbytes(f"{letter}{i},{j}") for j in (1, 2)] == [row * (1 + riding)] * 2
        if components.portals:
            assert watch.nbytes(f"P{i},2") == watch.nbytes(f"p{i},2") == row


def test_a_task_names_its_device_its_lane_and_on_the_cpu_no_stream():
    watch = watched_step(skip_pipe(transfer="host"))
    # halves of a backward pass are seen only with a schedule that has them
    assert {seen.task.kind for seen in watch.seen} == set(KINDS) - {"backward_inputs", "backward_weights"}
    for seen in watch.seen:
        assert (seen.task.device, seen.task.stream, seen.task.lane) == (torch.device("cpu"), None, "compute")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@every_combination
def test_without_gradients_only_forward_tasks_are_seen(components, mode):
    pipe = skip_pipe(components=components, checkpoint="always")
    with mode():
        watch = watched_step(pipe, backward=False)
    assert watch.names() == sorted(grid("F", range(M), range(N)))


def test_evaluation_is_seen_as_tasks_without_checkpoint():
    watch = watched_step(skip_pipe(checkpoint="always").eval())
    assert watch.names("R") == []
    assert watch.names("B") == sorted(grid("B", range(M), range(N)))


# --- backward passes without checkpoint: marks -----------------------------------------------------------------


class Spans(Watch):
    """Notes beginnings and every end, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def start(self, task):
        token = super().start(task)
        if task.kind == "backward":
            self.lines.append(f"{token.name}(")
        return token

    def finish(self, token, nbytes):
        super().finish(token, nbytes)
        if token.task.kind == "backward":
            self.lines.append(f"){token.name}")


def spans(requires_grad: bool) -> str:
    """Two partitions, two micro-batches, two parameters each; repeated ends in a row are written once."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipe = on_cpu(layers, [1, 1], chunks=2, checkpoint="never", components=Components(clock_cycle=False))
    with pipe.observe(watch := Spans()):
        pipe(torch.ones(4, 3, requires_grad=requires_grad)).sum().backward()
    lines = [line for line, before in zip(watch.lines, ["", *watch.lines], strict=False) if line != before]
    return " ".join(lines)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_backward_pass_without_checkpoint_ends_before_the_next_one_begins(requires_grad):
    """Also on the first partition where no input needs a gradient: then the parameters' gradients end it."""
    assert spans(requires_grad) == "B1,1( )B1,1 B1,0( )B1,0 B0,1( )B0,1 B0,0( )B0,0"


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("balance", [[1, 2], [3]], ids=str)
@pytest.mark.parametrize("checkpoint", ["except_last", "never"])
def test_tasks_that_begin_with_tokens_end_one_after_the_other(balance, checkpoint, transfer, workers):
    log = []

    class Begins(Watch):
        def start(self, task):
            seen = super().start(task)
            log.append(f"{seen.name}(")
            return seen

        def finish(self, token, nbytes):
            super().finish(token, nbytes)
            log.append(f"){token.name}")

    layers = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 3)).double()
    pipe = on_cpu(layers, balance, chunks=4, checkpoint=checkpoint, transfer=transfer, workers=workers)
    with pipe.observe(watch := Begins()):
        pipe(torch.arange(8).reshape(8, 1) % 5).sum().backward()
    names = [name for name in watch.order("RB").split() if name.endswith(",0")]
    again = "RB" if checkpoint == "except_last" else "B"
    assert names == ["B3,0", *(f"{letter}{i},0" for i in (2, 1, 0) for letter in again)]
    last = {entry: place for place, entry in enumerate(log)}
    for one, other in itertools.pairwise(names):
        assert last[f"){one}"] < last[f"{other}("]


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("checkpoint", MODES)
@every_combination
def test_a_backward_pass_is_seen_to_span_its_layers(components, checkpoint, requires_grad):
    log: list[str] = []

    class Shared(Spans):
        def __init__(self) -> None:
            super().__init__()
            self.lines = log

    pipe = probe_pipe(N, log, depth=2, chunks=M, components=components, checkpoint=checkpoint)
    with pipe.observe(Shared()):
        pipe(numbered(M).requires_grad_(requires_grad)).sum().backward()
    for name in grid("B", range(M), range(N)):
        first, last = log.index(name), log.index(name.lower())
        assert log.index(f"{name}(") < first
        assert last < len(log) - 1 - log[::-1].index(f"){name}"), name


def test_marks_are_taken_off_the_parameters_when_nobody_observes_any_more():
    pipe = skip_pipe(checkpoint="never")
    watch = watched_step(pipe)
    before = [(seen.name, seen.finished) for seen in watch.seen]
    pipe(batch()).sum().backward()
    assert [(seen.name, seen.finished) for seen in watch.seen] == before


# --- nothing is different -----------------------------------------------------------------------------------------


def nodes(output: Tensor) -> list[str]:
    """Names of all nodes of the autograd graph."""
    found, queue = [], [output.grad_fn]
    seen = set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.append(type(node).__name__)
        queue += [following for following, _ in node.next_functions]
    return sorted(found)


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", MODES)
@every_combination
def test_the_graph_is_the_same_but_for_marks(components, checkpoint, transfer):
    pipe = skip_pipe(components=components, checkpoint=checkpoint, transfer=transfer)
    plain = nodes(pipe(batch()))
    with pipe.observe(Watch()):
        observed = nodes(pipe(batch()))
    marks = [name for name in observed if name == "_ReportBackward"]
    assert [name for name in observed if name not in marks] == plain
    assert (marks == []) == (checkpoint != "never")


@pytest.mark.parametrize("checkpoint", MODES)
@every_combination
def test_the_order_is_the_same_and_what_is_seen(components, checkpoint):
    logs, watch = [], Watch()
    for observe in (False, True):
        log: list[str] = []
        pipe = probe_pipe(N, log, chunks=4, components=components, checkpoint=checkpoint)
        with pipe.observe(watch) if observe else nullcontext():
            output = pipe(numbered(4))
        log.clear()
        watch.seen.clear()
        output.sum().backward()
        logs.append(log)
    assert watch.order("RB").split() == logs[1]
    if checkpoint != "never":
        assert logs[0] == logs[1]
    elif components.fork_join:
        # without checkpoints the order of partitions among each other depends on the number of nodes, marks included
        for log, j in product(logs, range(N)):
            assert [name for name in log if name.endswith(f",{j}")] == [f"B{i},{j}" for i in (3, 2, 1, 0)]


@pytest.mark.parametrize("checkpoint", MODES)
def test_gradients_are_the_same(checkpoint):
    pipe = skip_pipe(checkpoint=checkpoint)
    pipe(batch()).sum().backward()
    plain = [parameter.grad.clone() for parameter in pipe.parameters()]
    pipe.zero_grad()
    watched_step(pipe)
    torch.testing.assert_close([parameter.grad for parameter in pipe.parameters()], plain)


# --- installing ----------------------------------------------------------------------------------------------------


def test_the_backward_pass_of_an_observed_batch_is_seen_after_the_block_too():
    pipe = skip_pipe(checkpoint="always")
    with pipe.observe(watch := Watch()):
        output = pipe(batch())
    output.sum().backward()
    assert watch.names("B") == sorted(grid("B", range(M), range(N)))


def test_the_backward_pass_of_a_batch_before_the_block_is_not_seen():
    pipe = skip_pipe(checkpoint="always")
    output = pipe(batch())
    with pipe.observe(watch := Watch()):
        output.sum().backward()
    assert watch.seen == []


def test_an_inner_observer_replaces_the_outer_one_for_its_block():
    pipe = skip_pipe()
    outer, inner = Watch(), Watch()
    with pipe.observe(outer):
        with pipe.observe(inner), torch.no_grad():
            pipe(batch())
        assert outer.seen == []
        with torch.no_grad():
            pipe(batch())
    assert outer.names() == inner.names() == sorted(grid("F", range(M), range(N)))


def test_an_observer_is_gone_after_an_exception():
    pipe = skip_pipe()
    watch = Watch()
    with pytest.raises(ZeroDivisionError), pipe.observe(watch):
        raise ZeroDivisionError
    pipe(batch())
    assert watch.seen == []


def test_kinds_of_computation_are_told_from_copies():
    watch = watched_step(skip_pipe(transfer="host", checkpoint="always"))
    assert {seen.name[0] for seen in watch.seen if seen.task.kind in COMPUTE_KINDS} == set("FRB")
