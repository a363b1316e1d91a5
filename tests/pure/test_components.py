"""The components: labels, published names, the full factorial."""

import dataclasses
import itertools

import pytest

from gpipe_bench.components import PUBLISHED, Components

ALL = list(Components.factorial())
SIXTY_FOUR = list(Components.factorial(shared=True))


def test_everything_is_on_by_default():
    assert dataclasses.astuple(Components()) == (True,) * 6


def test_factorial_is_all_32_combinations_everything_first():
    assert len(set(ALL)) == len(ALL) == 32
    assert ALL[0] == Components()
    assert ALL[-1] == Components(*[False] * 5, shared=True)


def test_where_copies_of_skips_are_shared_or_not_there_are_64_combinations():
    assert len(set(SIXTY_FOUR)) == len(SIXTY_FOUR) == 64
    assert [components for components in SIXTY_FOUR if components.shared] == ALL
    assert Components.switched(shared=True) == (*Components.switched(), "shared")


def test_labels_are_unique():
    assert len({components.label for components in SIXTY_FOUR}) == 64


@pytest.mark.parametrize("components", SIXTY_FOUR, ids=lambda components: components.label)
def test_label_round_trip(components):
    assert Components.from_label(components.label) == components


@pytest.mark.parametrize(
    ("components", "label"),
    [
        (Components(fork_join=False, copy_streams=False, portals=False), "baseline"),
        (Components(copy_streams=False, portals=False), "dep-x-x"),
        (Components(portals=False), "dep-str-x"),
        (Components(), "dep-str-ptl"),
    ],
)
def test_published_labels(components, label):
    assert components.label == label
    assert label in PUBLISHED


def test_published_order_adds_one_component_at_a_time():
    rows = [dataclasses.astuple(Components.from_label(label)) for label in PUBLISHED]
    for before, after in itertools.pairwise(rows):
        assert sum(after) == sum(before) + 1
        assert all(new or not old for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("components", "label"),
    [
        (Components(fork_join=False, portals=False), "x-str-x"),
        (Components(clock_cycle=False), "dep-str-ptl-x-rec"),
        (Components(early_recompute=False), "dep-str-ptl-clk-x"),
        (Components(*[False] * 5), "x-x-x-x-x"),
        (Components(clock_cycle=False, fork_join=False, copy_streams=False, portals=False), "x-x-x-x-rec"),
        (Components(shared=False), "dep-str-ptl-clk-rec-x"),
        (Components(*[False] * 6), "x-x-x-x-x-x"),
    ],
)
def test_unpublished_labels_have_the_same_form(components, label):
    assert components.label == label


def test_long_forms_of_short_labels_are_understood():
    assert Components.from_label("dep-x-x-clk-rec") == Components.from_label("dep-x-x")
    assert Components.from_label("dep-x-x-clk-rec-shr") == Components.from_label("dep-x-x")
    assert Components.from_label("x-x-x-clk-rec") == Components.from_label("x-x-x") == Components.from_label("baseline")


@pytest.mark.parametrize(
    "label",
    ["", "dep", "dep-str", "str-dep-ptl", "dep-str-ptl-clk", "dep-str-ptl-rec-clk", "Dep-str-ptl"],
)
def test_other_labels_are_refused(label):
    with pytest.raises(ValueError, match="variant must be") as caught:
        Components.from_label(label)
    assert repr(label) in str(caught.value)
    assert "dep-str-ptl" in str(caught.value)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Components)])
def test_a_switch_takes_only_bools(name):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got 'off'"):
        Components(**{name: "off"})


def test_components_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Components().portals = False


@pytest.mark.parametrize(("label", "meant"), [("dep-str-plt", "dep-str-ptl"), ("Basline", "baseline")])
def test_a_mistyped_label_is_told_the_nearest_one(label, meant):
    with pytest.raises(ValueError, match=f"use '{meant}'$"):
        Components.from_label(label)
