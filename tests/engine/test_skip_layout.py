"""Namespaces, where skips go, and every mismatch told at once."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import nn

from gpipe_bench.errors import SkipLayoutError
from gpipe_bench.skip import Namespace, peek, pop, skippable, stash, verify_skippables
from gpipe_bench.skip.layout import SkipCopy, inspect_skip_layout
from tests.engine.support import Do, Mix, Peek, Pop, Stash, on_cpu, skip_pair


@skippable(stash=["a", "b"])
class Two(nn.Module):
    def forward(self, x):
        yield stash("a", x)
        yield stash("b", x)
        return x


@skippable(stash=["skip"], pop=["skip"])
class Own(nn.Module):
    """Pops before it stashes: there is nothing to pop."""

    def forward(self, x):
        skip = yield pop("skip")
        yield stash("skip", x)
        return x + skip


@skippable(pop=["a", "b"])
class Both(nn.Module):
    def forward(self, x):
        yield None
        return x


@skippable(stash=["skip"], peek=["skip"])
class OwnPeek(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return x + (yield peek("skip"))


@skippable(pop=["skip"], peek=["skip"])
class PeekAndPop(nn.Module):
    def forward(self, x):
        return (yield peek("skip")) + (yield pop("skip"))


SKIP = SkipCopy((None, "skip"))


# --- namespaces ----------------------------------------------------------------------------------------------------


def test_namespaces_differ_and_are_ordered_by_creation():
    first, second, third = (Namespace() for _ in range(3))
    assert len({first, second, third}) == 3
    assert sorted([third, first, second]) == [first, second, third]
    assert first < second <= third
    assert first != second


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_copy_of_a_namespace_equals_it(again):
    namespace = Namespace()
    assert again(namespace) == namespace
    assert hash(again(namespace)) == hash(namespace)


def test_a_namespace_is_not_compared_with_something_else():
    assert Namespace() != 0
    with pytest.raises(TypeError):
        Namespace() < 0  # noqa: B015 - the comparison is what is tested


def test_isolation_chains_and_can_be_partial():
    namespace, other = Namespace(), Namespace()
    layer = Two()
    assert layer.isolate(namespace, only=["a"]).isolate(other, only=["b"]) is layer
    assert layer.stashes() == [(namespace, "a"), (other, "b")]


def test_without_isolation_a_skip_is_in_the_common_namespace():
    assert Two().stashes() == [(None, "a"), (None, "b")]


def test_a_later_isolation_replaces_an_earlier_one():
    first, second = Namespace(), Namespace()
    assert Two().isolate(first).isolate(second, only=["a"]).stashes() == [(second, "a"), (first, "b")]


def test_isolating_one_layer_leaves_others_of_its_class_alone():
    layer, other = Two(), Two()
    layer.isolate(Namespace())
    assert other.stashes() == [(None, "a"), (None, "b")]


def test_equal_names_in_several_namespaces_do_not_meet():
    (a, a_end), (b, b_end) = skip_pair(), skip_pair()

    def double(x):
        return x * 2

    x = torch.ones(2, 3, dtype=torch.float64)
    # b ends before a does
    module = nn.Sequential(a, Do(double), b, Do(double), a_end, b_end)
    expected = 4 * x + x.cos() + (2 * x).cos()
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(on_cpu(module, [1, 2, 1, 2], chunks=2)(x), expected)


# --- layout --------------------------------------------------------------------------------------------------------


def test_layout_of_three_skips():
    """
    partition    0   1   2   3
    a            *-----------*
    b            *---*
    c                *
    """
    (a, a_end), (b, b_end), (c, c_end) = (skip_pair() for _ in range(3))
    partitions = [
        nn.Sequential(a, Mix(), b),
        nn.Sequential(b_end, nn.Sequential(c, c_end)),
        nn.Sequential(Mix()),
        nn.Sequential(a_end),
    ]
    key_a, key_b, key_c = (layer.stashes()[0] for layer in (a, b, c))
    layout = inspect_skip_layout(partitions)
    assert layout.routes == {key_a: (0, 3), key_b: (0, 1), key_c: (1, 1)}
    a, b = SkipCopy(key_a), SkipCopy(key_b)
    assert layout.chains(shared=True) == {a: (0, 3), b: (0, 1)}
    direct, riding = (
        [layout.at(j, range(4), portals=portals, shared=True) for j in range(4)] for portals in (True, False)
    )
    assert [each.incoming for each in direct] == [[], [b], [], [a]]
    assert [each.outgoing for each in direct] == [[a, b], [], [], []]
    assert [each.incoming for each in riding] == [[], [a, b], [a], [a]]
    assert [each.outgoing for each in riding] == [[a, b], [a], [a], []]
    assert [each.stashed for each in direct] == [{key_a: 1, key_b: 1}, {key_c: 1}, {}, {}]


def chained(*places, portals=True):
    """
    A skip and four partitions. The layers of the first three are a stash and two that peek, one that peeks, and two
    that peek; the last one pops.
    """
    partitions = [[Stash(), Peek(), Peek()], [Peek()], [Peek(), Peek()], [Pop()]]
    layout = inspect_skip_layout([nn.Sequential(*layers) for layers in partitions])
    assert layout.routes == {(None, "skip"): (0, 0, 0, 1, 2, 2, 3)}
    assert layout.chains(shared=True) == {SKIP: (0, 1, 2, 3)}
    return [layout.at(j, places, portals=portals, shared=True) for j in range(4)]


@pytest.mark.parametrize(
    ("places", "sources", "targets"),
    [
        ((0, 1, 2, 3), [0, 1, 2], [[1], [2], [3]]),
        # devices 0 and 1 in turn: each takes it from itself
        ((0, 1, 0, 1), [0, 0, 1], [[1, 2], [3], []]),
        # there and back again
        ((0, 1, 1, 0), [0, 1, 0], [[1, 3], [2], []]),
    ],
)
def test_a_skip_that_is_read_many_times_comes_to_each_device_once(places, sources, targets):
    skips = chained(*places)
    assert [each.sources for each in skips] == [{}, *({SKIP: source} for source in sources)]
    assert [each.targets for each in skips] == [*({SKIP: ends} for ends in targets), {}]
    assert [each.previous for each in skips] == [{}, {SKIP: 0}, {SKIP: 1}, {SKIP: 2}]
    # each reader, and one more where it goes on
    assert [each.stashed for each in skips] == [{(None, "skip"): 3}, {}, {}, {}]
    assert [each.uses for each in skips] == [{}, {SKIP: 2}, {SKIP: 3}, {SKIP: 1}]
    assert [each.shared for each in skips] == [{SKIP}, {SKIP}, {SKIP}, set()]


def test_a_skip_that_is_read_many_times_rides_along_without_portals():
    skips = chained(0, 1, 0, 1, portals=False)
    assert [each.sources for each in skips] == [{}, {SKIP: 0}, {SKIP: 1}, {SKIP: 2}]
    assert [each.targets for each in skips] == [{SKIP: [1]}, {SKIP: [2]}, {SKIP: [3]}, {}]


@pytest.mark.parametrize("portals", [True, False])
def test_without_shared_copies_each_reader_has_its_own(portals):
    """Layers: a stash and one that peeks; two that peek; none; one that peeks."""
    partitions = [[Stash(), Peek()], [Peek(), Peek()], [Mix()], [Peek()]]
    layout = inspect_skip_layout([nn.Sequential(*layers) for layers in partitions])
    first, second, last = (SkipCopy((None, "skip"), number) for number in (1, 2, 3))
    assert layout.chains(shared=False) == {first: (0, 1), second: (0, 1), last: (0, 3)}
    skips = [layout.at(j, range(4), portals=portals, shared=False) for j in range(4)]
    assert [each.stashed for each in skips] == [{(None, "skip"): 4}, {}, {}, {}]
    assert skips[0].outgoing == [first, second, last]
    riding = [] if portals else [last]
    assert [each.incoming for each in skips[1:]] == [[first, second, *riding], riding, [last]]
    assert [each.outgoing for each in skips[1:]] == [riding, riding, []]
    assert all(count == 1 for each in skips for count in each.uses.values())
    assert skips[0].shared == {first, second, last}


# --- mismatches ----------------------------------------------------------------------------------------------------

MISMATCHES = {
    "never read": ([Stash()], "no layer reads 'skip'"),
    "never stashed": ([Pop()], "layer '0' pops 'skip', which no earlier layer stashes"),
    "in the wrong order": ([Pop(), Stash()], "layer '0' pops 'skip', which no earlier layer stashes"),
    "stashed twice": ([Stash(), Stash(), Pop()], "layer '1' stashes 'skip', which an earlier layer stashed already"),
    "popped twice": ([Stash(), Pop(), Pop()], "layer '2' pops 'skip', which an earlier layer popped already"),
    "stashed and popped by one layer": ([Mix(), Own()], "layer '1' both stashes and pops 'skip'"),
    "stashed and popped by one layer, and popped again": (
        [Own(), Pop()],
        "layer '0' both stashes and pops 'skip'; layer '1' pops 'skip', which an earlier layer popped already",
    ),
    "in another namespace": (
        [Stash(Namespace()), Pop(Namespace())],
        "layer '1' pops 'skip', which no earlier layer stashes; no layer reads 'skip'",
    ),
    "peeked and never stashed": ([Peek()], "layer '0' peeks 'skip', which no earlier layer stashes"),
    "peeked before its stash": ([Peek(), Stash(), Pop()], "layer '0' peeks 'skip', which no earlier layer stashes"),
    "peeked after its pop": ([Stash(), Pop(), Peek()], "layer '2' peeks 'skip', which an earlier layer popped already"),
    "stashed and peeked by one layer": ([OwnPeek(), Pop()], "layer '0' both stashes and peeks 'skip'"),
    "popped and peeked by one layer": ([Stash(), PeekAndPop()], "layer '1' both pops and peeks 'skip'"),
    "deep inside": (
        [nn.Sequential(Mix(), nn.Sequential(Pop()))],
        "layer '0.1.0' pops 'skip', which no earlier layer stashes",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch(name):
    layers, message = MISMATCHES[name]
    with pytest.raises(SkipLayoutError) as caught:
        verify_skippables(nn.Sequential(*layers))
    assert str(caught.value) == (
        f"every skip must be stashed once and read by later layers, of which only the last one pops it, got {message}; "
        "correct the declarations, or isolate() layers that use equal names"
    )


def test_all_mismatches_are_told_at_once():
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(Pop(), Two(), Stash(), Stash()))
    text = str(caught.value)
    for part in ("layer '0' pops 'skip'", "layer '3' stashes 'skip', which an earlier", "reads 'a'", "reads 'b'"):
        assert re.search(re.escape(part), text), part


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [Mix()],
        [Stash(), Pop()],
        [Two(), Mix(), Both()],
        [nn.Sequential(Stash()), nn.Sequential(Mix(), Pop())],
        [*skip_pair(), *skip_pair()],
        [Stash(), Peek()],
        [Stash(), Peek(), nn.Sequential(Peek(), Mix()), Pop()],
    ],
)
def test_what_matches(layers):
    verify_skippables(nn.Sequential(*layers))
