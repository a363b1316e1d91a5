"""Each named schedule is the list of its source: what the authors' programs gave, and the installed PyTorch."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from gpipe_bench.schedules import Durations, check, in_flight, named_schedule, read_csv, searched, timing, to_csv
from gpipe_bench.schedules.cycles import clock_cycles

DATA = Path(__file__).parent / "data"


def lists(source):
    """(name, m, n, devices) and the text of each list of a source."""
    with (DATA / f"{source}.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            devices = row["actions_of_each_device"].split("|")
            n = int(row["per_device"]) * len(devices)
            key = row["schedule"], int(row["microbatches"]), n, len(devices)
            yield key, "".join(",".join(actions.split()) + "\n" for actions in devices)


NOT_OURS = {("pytorch", "gpipe"), ("sail_sg", "zb_v automatic")}
"""Lists that we compare with and do not have: the backward passes of ``gpipe`` in order, a search with times."""


@pytest.mark.parametrize("source", ["torchgpipe", "pytorch", "sail_sg", "deepseek", "primus"])
def test_lists_are_those_of_their_sources(source):
    own = [(key, text) for key, text in lists(source) if (source, key[0]) not in NOT_OURS]
    assert len(own) > 10
    assert not [key for key, text in own if to_csv(named_schedule(*key)) != text]


def test_the_clock_cycles_are_torchgpipes():
    with (DATA / "torchgpipe_cycles.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            ours = clock_cycles(int(row["microbatches"]), int(row["partitions"]))
            text = "|".join(" ".join(f"{i},{j}" for i, j in cycle) for cycle in ours)
            assert text == row["tasks_of_each_cycle"]


def test_gpipe_is_pytorchs_with_the_backward_passes_in_reverse():
    for key, text in lists("pytorch"):
        if key[0] == "gpipe":
            m, ours, theirs = key[1], named_schedule(*key), read_csv(text)
            assert list(ours.devices) == [row[:m] + row[m:][::-1] for row in theirs.devices]
            assert timing(ours).makespan == timing(theirs).makespan


def test_the_automatic_zb_v_is_as_long_in_the_same_memory_and_shorter_for_few_microbatches():
    settings = [(key, read_csv(text)) for key, text in lists("sail_sg") if key[0] == "zb_v automatic"]
    assert len(settings) == 28
    for (_, m, n, p), theirs in settings:
        ours = named_schedule("zb_v", m, n, p)
        check(theirs)
        if m >= 2 * p - 1:
            assert timing(ours).spans == timing(theirs).spans
            assert timing(ours).makespan == timing(theirs).makespan
            assert in_flight(ours) == in_flight(theirs)
        else:
            assert 0.045 < 1 - timing(theirs).makespan / timing(ours).makespan < 0.075


@pytest.mark.parametrize(("name", "ahead"), [("zb_h1", 1), ("zb_h2", 2)])
def test_zb_h1_and_zb_h2_are_those_of_the_figure(name, ahead):
    """Zero Bubble, figure 3, by the rule for any size that its second source in the README of the data gives."""
    with (DATA / "figures.csv").open(encoding="utf-8") as file:
        figure = [row for row in csv.DictReader(file) if row["schedule"] == name]
    assert len(figure) == 2
    for row in figure:
        device, m, p = (int(row[column]) for column in ("device", "microbatches", "devices"))
        assert [f"{kind}{i}" for kind, i, _ in named_schedule(name, m, p, p).devices[device]] == row["actions"].split()
    for p in range(1, 9):
        for m in range(1, 4 * p + 1):
            behind = {"F": 0, "W": ahead * (p - 1)}
            for j, row in enumerate(named_schedule(name, m, p, p).devices):
                behind["I"] = ahead * (p - 1 - j)
                turns = ((kind, x - behind[kind], j) for x in range(m + behind["W"]) for kind in "FIW")
                assert list(row) == [action for action in turns if 0 <= action[1] < m]


def test_a_search_is_about_as_short_as_the_one_of_the_authors():
    longer = []
    with (DATA / "sail_sg_times.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            p, m, *times, transfer, limit, kept, theirs = map(float, row.values())
            own = Durations(*times)
            schedule = searched(int(m), int(p), limit, own, transfer, kept=kept)
            check(schedule)
            longer.append(round(max(timing(schedule, own, transfer).spans) / theirs - 1, 9))
    assert len(longer) == 40
    assert sum(more > 0 for more in longer) <= 4
    assert max(longer) < 0.04


TORCH = {
    "looped_bfs": ("LoopedBFS", (1, 2, 3)),
    "interleaved": ("Interleaved1F1B", (1, 2, 3)),
    "interleaved_zb": ("InterleavedZeroBubble", (1, 2, 3)),
    "zb_v": ("ZBVZeroBubble", (2,)),
    "dualpipe_v": ("DualPipeV", (2,)),
}


@pytest.mark.parametrize("name", TORCH)
def test_lists_are_those_of_the_installed_pytorch(name):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    its_name, per_device = TORCH[name]
    kind = getattr(schedules, f"Schedule{its_name}")
    compared = 0
    for v in per_device:
        for p in range(1, 7):
            for m in (*range(1, 10), 12, 16, 18):
                rounds = max(1, m // p)
                if (name == "dualpipe_v" and m < 2 * p) or (name.startswith("interleaved") and m % rounds):
                    continue  # PyTorch refuses these
                own = kind.__new__(kind)
                own.pp_group_size, own._n_microbatches, own.num_stages = p, m, p * v
                own.n_local_stages, own._stages = v, [None] * v
                own.number_of_rounds, own.microbatches_per_round = rounds, m // rounds
                rows = [own._calculate_single_rank_operations(rank) for rank in range(p)]
                text = "".join(",".join(str(one) for one in row if one is not None) + "\n" for row in rows)
                assert to_csv(named_schedule(name, m, p * v, p)) == text, (v, p, m)
                compared += 1
    assert compared > 20
