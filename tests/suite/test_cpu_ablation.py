"""Rows of the ablation on a CPU: ways to run one batch, side by side."""

from __future__ import annotations

import csv
import os
import random
from collections import Counter
from dataclasses import replace

import pytest

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.figures.tables import read_rows
from gpipe_bench.results.intervals import ratio_interval
from gpipe_bench.results.labels import LOOP, MICROBATCH_LOOP, PAPER
from gpipe_bench.results.outcomes import THROUGHPUT, group_rows, way_of
from gpipe_bench.suite.running.trial import Trial
from tests.figures.synthetic import accelerator_ablation, cpu_ablation, cpu_ways
from tests.suite.cells_of import TINY, cell


@pytest.mark.usefixtures("cache")
def test_an_open_balance_is_found_once_for_all_cells():
    open_ = {**TINY, "balance": "auto"}
    first, second = (Trial(cell(**{**open_, "variant": name})).pipe.balance for name in ("dep-x-ptl", "baseline"))
    assert first == second
    assert (len(first), sum(first)) == (2, 29)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))


def test_rows_of_a_cpu_are_one_group_by_the_way_in_which_they_were_run():
    (group,) = group_rows(cpu_ways())
    assert [outcome.variant for outcome in group.ordered()] == [LOOP, MICROBATCH_LOOP, PAPER, "gpipe", "1f1b", "zb_v"]
    assert group.ratio(group.outcomes["1f1b"]).median == 1.8
    assert group.outcomes["zb_v"].failed


# --- ratios of neighbours --------------------------------------------------------------------------------------------

SPEEDS = {LOOP: 100.0, MICROBATCH_LOOP: 90.0, "gpipe": 150.0, "1f1b": 180.0}


def measured(chance, repeats=4, *, turns, noisy=()):
    """Rows of ways on a machine whose speed changes between repeats, which for some ways comes on top."""
    machine = [chance.uniform(0.2, 1) for _ in range(repeats)]
    found = []
    for row in cpu_ways(repeats):
        k, place = row.repeat, list(SPEEDS).index(way_of(row)) if way_of(row) in SPEEDS else -1
        if place < 0:
            continue
        speed = SPEEDS[way_of(row)] * machine[k] * (1 + 0.5 * (k % 2) * (way_of(row) in noisy))
        second = len(SPEEDS) * k + place if turns else repeats * place + k
        found.append(replace(row, throughput_samples_per_s=speed, started_utc=f"2026-11-29T09:00:{second:02}+00:00"))
    chance.shuffle(found)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_cells_that_took_turns_are_compared_repeat_by_repeat(seed):
    (group,) = group_rows(measured(random.Random(seed), turns=True))
    for way, speed in SPEEDS.items():
        ratio = group.ratio(group.outcomes[way])
        assert ratio == (None if way == LOOP else (4, *[pytest.approx(speed / SPEEDS[LOOP])] * 3))
        assert group.ratios(group.outcomes[way]) == [pytest.approx(speed / SPEEDS[LOOP])] * 4
        assert not group.noisy(group.outcomes[way])


@pytest.mark.parametrize("seed", range(5))
def test_cells_that_ran_one_after_the_other_are_no_pairs(seed):
    (group,) = group_rows(measured(random.Random(seed), turns=False))
    for way in (MICROBATCH_LOOP, "gpipe", "1f1b"):
        samples = [group.outcomes[name].samples(THROUGHPUT) for name in (way, LOOP)]
        assert group.ratio(group.outcomes[way]) == ratio_interval(*samples)


def test_rows_that_do_not_say_when_they_began_are_no_pairs():
    (group,) = group_rows([replace(row, started_utc="") for row in measured(random.Random(0), turns=True)])
    assert not group.in_turns


def test_a_repeat_that_failed_is_no_pair():
    rows = measured(random.Random(1), turns=True)
    failed = {"status": "error", "reason": "RuntimeError", "throughput_samples_per_s": None}
    rows = [replace(row, **failed) if (way_of(row), row.repeat) == ("1f1b", 2) else row for row in rows]
    (group,) = group_rows(rows)
    assert group.ratio(group.outcomes["1f1b"]).n == 3
    assert group.ratio(group.outcomes["gpipe"]).n == 4


@pytest.mark.parametrize("noisy", [(), ("gpipe",), ("gpipe", "1f1b"), (LOOP,)])
def test_each_pair_is_judged_by_itself(noisy):
    (group,) = group_rows(measured(random.Random(2), turns=True, noisy=noisy))
    found = {outcome.variant for outcome in group.ordered() if group.noisy(outcome)}
    assert found == ({*SPEEDS} - {LOOP} if LOOP in noisy else set(noisy))


def test_the_committed_rows_ran_in_turns_of_five_steps():
    table = REFERENCE_FOLDER / "measured" / "2x-intel-xeon-processor" / "ablation.csv"
    (group,) = group_rows(read_rows(table))
    assert group.in_turns
    with table.with_name("ablation_steps.csv").open(newline="") as file:
        steps = Counter((line["cell"], line["repeat"]) for line in csv.DictReader(file))
    assert (len(steps), {*steps.values()}) == (27, {5})


def test_other_rows_have_no_way():
    rows = [*accelerator_ablation(1), *accelerator_ablation(1, "simulated")]
    assert {way_of(row) for row in rows} == {""}
    assert len(group_rows(cpu_ablation())) == 1
