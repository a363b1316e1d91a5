"""Sentences of docs/peers.md about processes against processes say what the rows of the race say."""

from __future__ import annotations

import csv

import pytest

from gpipe_bench.data import REFERENCE_FOLDER
from tests.project.pages import PAGES

PAGE = " ".join(PAGES["docs/peers.md"].split())
FOLDER = REFERENCE_FOLDER / "measured" / "2x-intel-xeon-processor-processes"
Row = dict[str, str]


def rows(name: str) -> list[Row]:
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def places(own: list[Row]) -> dict[tuple[str, ...], Row]:
    return {tuple(row[name] for name in ("contender", "workload", "checkpoint", "chunks")): row for row in own}


KNOWN = places(rows("peers.csv"))
# Each cell of ours with that of PyTorch for the same schedule; zb_h1 has none, so it meets the other zero-bubble one.
PAIRS = {
    (place[0].partition("-")[2], *place[1:]): (row, KNOWN[f"pipelining-{theirs}", *place[1:]])
    for place, row in KNOWN.items()
    if place[0].startswith("distributed-")
    and (theirs := place[0].partition("-")[2].replace("zb-h1", "zero-bubble"))
    and (f"pipelining-{theirs}", *place[1:]) in KNOWN
}
NETWORKS = {place: pair for place, pair in PAIRS.items() if place[1] != "cells"}
ZERO_BUBBLE = ("zb-h1", "zb-v")
SLOW = {place for place in NETWORKS if place[0] in ZERO_BUBBLE and place[2] == "always"}
CONVOLUTIONS = {place for place in NETWORKS if place[1] in ("convnet", "unet")} - SLOW


def said(values: list[float], digits: str = ".1f") -> str:
    return f"{min(values):{digits}} to {max(values):{digits}}"


def faster(place: tuple[str, ...]) -> float:
    ours, theirs = PAIRS[place]
    return float(theirs["step_time_ms"]) / float(ours["step_time_ms"])


def test_zero_bubble_schedules_with_checkpoints():
    assert f"{said([faster(place) for place in SLOW])} times as fast" in PAGE
    passes = [float(PAIRS[place][1]["forward_passes"]) for place in SLOW]
    assert f"{min(passes):.1f} to {max(passes):.0f} forward passes" in PAGE


def test_other_cells():
    assert f"convolutions ({said([faster(place) for place in CONVOLUTIONS], '.2f')})" in PAGE
    decoder = [faster(place) for place in {*NETWORKS} - SLOW if place[1:3] == ("decoder", "always")]
    assert f"{said(decoder)} times as fast on the decoder with checkpoints" in PAGE


@pytest.mark.parametrize(("schedule", "name"), [("gpipe", "GPipe reaches"), ("1f1b", "1F1B")])
def test_tiny_layers(schedule, name):
    tiny = [faster(place) for place in PAIRS if place[:2] == (schedule, "cells")]
    assert len(tiny) == 4
    assert f"{name} {said(tiny)} times" in PAGE


def test_live_bytes():
    same = [pair for place, pair in NETWORKS.items() if place[0] != "zb-h1"]
    live = [float(theirs["peak_live_mib"]) / float(ours["peak_live_mib"]) for ours, theirs in same]
    assert f"{said(live)} times as many bytes" in PAGE
