"""Skips between partitions: which way they go, what they cost, and how long they live."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe_bench import Components, is_recomputing
from gpipe_bench.skip import pop, skippable, stash
from tests.engine.support import MODES, SOME, Mix, Pop, Stash, Watch, assert_same, label, on_cpu, score, train_step

ROWS = 2
# a skip has 7 columns where the main tensor has 3
MAIN, SKIP = ROWS * 3 * 8, ROWS * 7 * 8
ONE_THREAD = Components(clock_cycle=False)
PORTALS_OFF = Components(clock_cycle=False, portals=False)


@skippable(stash=["wide"])
class Widen(nn.Module):
    """Stashes a tensor of 7 columns of its own, and keeps a weak reference on it."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Linear(3, 7)
        self.made: list[StorageWeakRef] = []

    def forward(self, x: Tensor):
        wide = self.expand(x)
        if not is_recomputing():
            self.made.append(StorageWeakRef(wide.untyped_storage()))
        yield stash("wide", wide)
        return x * 1


@skippable(pop=["wide"])
class Fold(nn.Module):
    """Adds the columns of what it pops, and keeps a weak reference on it."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[StorageWeakRef] = []

    def forward(self, x: Tensor):
        wide = yield pop("wide")
        if not is_recomputing():
            self.got.append(StorageWeakRef(wide.untyped_storage()))
        return x + wide.sum(1, keepdim=True)


def chain(m=2, **options):
    """Four partitions; the skip goes from the first to the last."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Sequential(Widen(), Mix()), Mix(), Mix(), nn.Sequential(Fold(), Mix())).double()
    return on_cpu(layers, [1, 1, 1, 1], chunks=m, transfer="host", **options)


def batch(m=2, *, requires_grad=False) -> Tensor:
    return torch.linspace(-1, 1, m * ROWS * 3, dtype=torch.float64).view(-1, 3).requires_grad_(requires_grad)


def copied(components: Components, **options) -> dict[str, int]:
    """Bytes of every copy of one micro-batch's step."""
    pipe = chain(1, components=components, **options)
    with pipe.observe(watch := Watch()):
        score(pipe(batch(1))).backward()
    return {seen.name: seen.nbytes for seen in watch.seen if seen.name[0] in "CcPp"}


# --- which way -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", MODES)
def test_with_portals_a_skip_goes_in_one_hop_and_its_gradient_comes_back_in_one(checkpoint):
    assert copied(Components(), checkpoint=checkpoint) == {
        "C0,1": MAIN, "C0,2": MAIN, "P0,3": SKIP, "C0,3": MAIN,
        "c0,3": MAIN, "p0,3": SKIP, "c0,2": MAIN, "c0,1": MAIN,
    }  # fmt: skip


@pytest.mark.parametrize("checkpoint", MODES)
def test_without_portals_a_skip_rides_through_every_partition(checkpoint):
    assert copied(Components(portals=False), checkpoint=checkpoint) == {
        "C0,1": MAIN + SKIP, "C0,2": MAIN + SKIP, "C0,3": MAIN + SKIP,
        "c0,3": MAIN + SKIP, "c0,2": MAIN + SKIP, "c0,1": MAIN + SKIP,
    }  # fmt: skip


def checkpoint_inputs(output: Tensor) -> list[list[int]]:
    """Columns of the tensors that each checkpoint keeps, from the first partition to the last."""
    found, seen, queue = [], set(), [output.grad_fn]
    while queue:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "CheckpointBackward":
            found.append([tensor.size(1) for tensor in node.saved_tensors])
        queue += [following for following, _ in node.next_functions]
    return found[::-1]


@pytest.mark.parametrize(("portals", "kept"), [(True, [[3], [3], [3], [3, 7]]), (False, [[3], [3, 7], [3, 7], [3, 7]])])
def test_which_checkpoints_keep_the_skip(portals, kept):
    pipe = chain(1, components=Components(portals=portals), checkpoint="always")
    assert sorted(checkpoint_inputs(pipe(batch(1)))) == sorted(kept)


def test_several_skips_of_one_partition_go_their_own_ways():
    """Skip a: 0 to 2, b: 0 to 1, c: stays in 1."""

    def pair(name):
        @skippable(stash=[name])
        class Enter(nn.Module):
            def forward(self, x):
                yield stash(name, x.sin())
                return x

        @skippable(pop=[name])
        class Leave(nn.Module):
            def forward(self, x):
                skip = yield pop(name)
                return x + skip

        return Enter(), Leave()

    (a, a_end), (b, b_end), (c, c_end) = (pair(name) for name in "abc")
    plain = nn.Sequential(
        nn.Sequential(Mix(), a, b), nn.Sequential(b_end, c, Mix(), c_end), nn.Sequential(a_end, Mix())
    )
    plain.double()
    pipe = on_cpu(copy.deepcopy(plain), [1, 1, 1], transfer="host", components=ONE_THREAD)
    with pipe.observe(watch := Watch()):
        assert_same(train_step(pipe, batch()), train_step(plain, batch()))
    assert watch.order("FCP") == "F0,0 P0,1 C0,1 F0,1 P0,2 C0,2 F0,2"


@pytest.mark.parametrize("components", SOME, ids=label)
def test_a_skip_of_nothing_is_copied_nowhere(components):
    plain = nn.Sequential(Mix(), Stash(nothing=True), Mix(), Pop(), Mix()).double()
    pipe = on_cpu(copy.deepcopy(plain), [2, 1, 2], chunks=2, transfer="host", components=components)
    with pipe.observe(watch := Watch()):
        assert_same(train_step(pipe, batch()), train_step(plain, batch()))
    assert watch.order("Pp") == ""


# --- how long ----------------------------------------------------------------------------------------------------


class Lives(Watch):
    """Notes before every task how many stashed tensors, and how many popped ones, are alive."""

    def __init__(self, pipe) -> None:
        super().__init__()
        self.stashed, self.popped = pipe[0][0].made, pipe[3][0].got
        self.lines: list[str] = []

    def start(self, task):
        token = super().start(task)
        alive = [sum(not ref.expired() for ref in refs) for refs in (self.stashed, self.popped)]
        self.lines.append(f"{token.name}:{alive[0]}{alive[1]}")
        return token


def lives(components=ONE_THREAD, *, grad=True, **options) -> str:
    pipe = chain(components=components, **options)
    # the first batch shows whether layers write to their inputs, and copies those to find out
    score(pipe(batch())).backward()
    pipe[0][0].made.clear()
    pipe[3][0].got.clear()
    pipe.train(grad)
    with pipe.observe(watch := Lives(pipe)), torch.set_grad_enabled(grad):
        output = pipe(batch())
        if grad:
            score(output).backward()
    return " ".join(line for line in watch.lines if line[0] in "FRBPp")


@pytest.mark.usefixtures("no_gc")
class TestLives:
    """``P0,3:10`` says: before that portal one stashed tensor is alive and no popped one."""

    def test_without_gradients_a_portal_frees_the_source_and_a_pop_the_copy(self):
        assert lives(grad=False) == ("F0,0:00 F0,1:10 F0,2:10 P0,3:10 F0,3:00 F1,0:00 F1,1:10 F1,2:10 P1,3:10 F1,3:00")

    def test_without_portals_the_tensor_given_to_the_first_copy_is_freed_by_it(self):
        assert lives(PORTALS_OFF, grad=False) == "F0,0:00 F0,1:00 F0,2:00 F0,3:00 F1,0:00 F1,1:00 F1,2:00 F1,3:00"

    def test_a_checkpoint_keeps_the_copy_until_its_backward_pass(self):
        assert lives(checkpoint="always") == (
            "F0,0:00 F0,1:10 F0,2:10 P0,3:10 F0,3:00 "
            "F1,0:01 F1,1:11 F1,2:11 P1,3:11 F1,3:01 "
            "R1,3:02 B1,3:02 p1,3:01 R1,2:01 B1,2:01 R1,1:01 B1,1:01 R1,0:01 B1,0:01 "
            "R0,3:01 B0,3:01 p0,3:00 R0,2:00 B0,2:00 R0,1:00 B0,1:00 R0,0:00 B0,0:00"
        )

    def test_the_last_microbatch_keeps_nothing_that_its_layers_do_not_need(self):
        assert lives(checkpoint="except_last") == (
            "F0,0:00 F0,1:10 F0,2:10 P0,3:10 F0,3:00 "
            "F1,0:01 F1,1:11 F1,2:11 P1,3:11 F1,3:01 "
            "B1,3:01 p1,3:01 B1,2:01 B1,1:01 B1,0:01 "
            "R0,3:01 B0,3:01 p0,3:00 R0,2:00 B0,2:00 R0,1:00 B0,1:00 R0,0:00 B0,0:00"
        )

    def test_without_checkpoint_a_pop_frees_the_copy(self):
        assert lives(checkpoint="never") == (
            "F0,0:00 F0,1:10 F0,2:10 P0,3:10 F0,3:00 "
            "F1,0:00 F1,1:10 F1,2:10 P1,3:10 F1,3:00 "
            "B1,3:00 p1,3:00 B1,2:00 B1,1:00 B1,0:00 B0,3:00 p0,3:00 B0,2:00 B0,1:00 B0,0:00"
        )
