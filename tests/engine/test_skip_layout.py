"""Namespaces, where skips go, and every mismatch told at once."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import nn

from gpipe_bench.errors import SkipLayoutError
from gpipe_bench.skip import Namespace, pop, skippable, stash, verify_skippables
from gpipe_bench.skip.layout import inspect_skip_layout
from tests.engine.support import Do, Mix, Pop, Stash, on_cpu, skip_pair


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
    assert [layout.arrivals(j) for j in range(4)] == [[], [key_b], [], [key_a]]
    assert [layout.departures(j) for j in range(4)] == [[key_a, key_b], [], [], []]
    assert [layout.passing(j) for j in range(-1, 4)] == [[], [key_a, key_b], [key_a], [key_a], []]


# --- mismatches ----------------------------------------------------------------------------------------------------

MISMATCHES = {
    "never popped": ([Stash()], "no layer pops 'skip'"),
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
        "layer '1' pops 'skip', which no earlier layer stashes; no layer pops 'skip'",
    ),
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
        f"every skip must be stashed once and popped once by a later layer, got {message}; correct the declarations, "
        "or isolate() layers that use equal names"
    )


def test_all_mismatches_are_told_at_once():
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(Pop(), Two(), Stash(), Stash()))
    text = str(caught.value)
    for part in ("layer '0' pops 'skip'", "layer '3' stashes 'skip', which an earlier", "pops 'a'", "pops 'b'"):
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
    ],
)
def test_what_matches(layers):
    verify_skippables(nn.Sequential(*layers))
