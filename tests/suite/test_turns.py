"""Cells in turns: each repeat in a process of its own, each a result, one piece of one process at a time."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from dataclasses import replace
from functools import partial
from statistics import median

import pytest

from gpipe_bench.errors import ConfigError
from gpipe_bench.results.outcomes import group_rows
from gpipe_bench.suite.running.turns import run_repeats, take_turns
from gpipe_bench.suite.storage.raw import RawResult, cell_row
from gpipe_bench.util.processes import FORKS
from tests.suite.cells_of import cell, ok_result

pytestmark = pytest.mark.skipif(not FORKS, reason="what measures must be a function of a module here")
SEEDS = range(5)


def measured(made, repeat):
    """A result that says which process made it."""
    result = ok_result(made.variant, repeat)
    return replace(result, row=replace(result.row, reason=str(os.getpid())))
    yield


def refused(made, repeat):
    raise AssertionError


def run(repeats, measure, *cells, budget_s=None):
    reported = []
    results = run_repeats([cells or [cell()]], repeats, reported.append, measure, budget_s)
    assert sorted(map(repr, filter(None, reported))) == sorted(map(repr, results))
    return results


def test_every_repeat_has_a_process_of_its_own():
    results = run(3, measured)
    assert [result.row.repeat for result in results] == [0, 1, 2]
    assert len({result.row.reason for result in results} | {str(os.getpid())}) == 4


@pytest.mark.parametrize("steps", [0, 2])
def test_a_process_that_dies_is_a_row_and_the_others_go_on(steps):
    def measure(made, repeat):
        for _ in range(steps):
            yield
        if (made.seed, repeat) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        yield
        return (yield from measured(made, repeat))

    rows = [result.row for result in run(3, measure, cell(), cell(seed=1))]
    assert [row.status for row in rows] == ["ok", "ok", "ok", "ok", "error", "ok"]
    assert rows[4].reason == "process was killed by signal 9 (SIGKILL) before it had measured"
    assert (rows[4].seed, rows[4].repeat, rows[4].throughput_samples_per_s) == (1, 1, None)


def test_a_process_that_leaves_without_a_result_is_a_row():
    (row,) = (result.row for result in run(1, lambda made, repeat: os._exit(3)))
    assert (row.status, row.reason.split(" before")[0]) == ("error", "process ended with status 3")


def test_refused_arguments_are_no_result():
    def measure(made, repeat):
        yield
        raise ConfigError(["balance must be 17 layers"])

    with pytest.raises(ConfigError, match="balance must be 17 layers"):
        run(2, measure, cell(), cell(seed=1))


def test_an_unsupported_cell_needs_no_process_and_is_one_row():
    rows = [result.row for result in run(2, refused, cell(variant="dep-str-ptl"))]
    assert [(row.repeat, row.status) for row in rows] == [(0, "unsupported")]


def test_groups_are_measured_round_by_round():
    def measure(made, repeat):
        result = ok_result(made.variant, repeat)
        return replace(result, row=replace(result.row, seed=made.seed))
        yield

    reported = []
    results = run_repeats([[cell()], [cell(seed=1)]], 2, reported.append, measure)
    assert [(result.row.repeat, result.row.seed) for result in reported] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [(result.row.repeat, result.row.seed) for result in results] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_what_the_budget_does_not_allow_is_a_row_that_says_so():
    rows = [result.row for result in run(2, refused, cell(), cell(variant="dep-str-ptl"), budget_s=0.0)]
    assert [(row.repeat, row.status) for row in rows] == [(0, "skipped"), (1, "skipped"), (0, "unsupported")]
    assert rows[0].reason == "the budget of time did not suffice for this run"


def test_a_run_that_outlasts_the_budget_is_ended():
    def measure(made, repeat):
        signal.pause()
        yield

    results = run(2, measure, budget_s=0.5)
    assert [result.row.status for result in results] == ["skipped", "skipped"]


# --- whose turn it is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_each_one_that_waits_has_one_turn_a_round(seed):
    chance = random.Random(seed)
    left = {name: chance.randrange(6) for name in "ABCDE"}
    most, asked = chance.choice([None, 3]), dict(left)
    rounds = {}
    for number, place, name in take_turns(lambda: [one for one in asked if asked[one]], seed, most):
        assert place == len(rounds.setdefault(number, []))
        rounds[number].append(name)
        asked[name] -= 1
    wanted = range(min(max(left.values()), 6 if most is None else most))
    assert {number: sorted(names) for number, names in rounds.items()} == {
        number: [name for name in sorted(left) if left[name] > number] for number in wanted
    }


def test_orders_are_drawn_anew_and_the_same_for_one_seed():
    def orders(seed):
        return [name for _, _, name in take_turns(lambda: "ABCDEF", seed, most=4)]

    assert orders(3) == orders(3) != orders(4)
    assert len({tuple(orders(3)[k : k + 6]) for k in range(0, 24, 6)}) == 4


def diary_of(folder):
    return [tuple(map(int, line.split())) for line in (folder / "diary").read_text().splitlines()]


@pytest.mark.parametrize("seed", SEEDS)
def test_cells_step_in_turns_and_repeats_one_after_the_other(tmp_path, seed):
    """Each cell writes down its pieces: number of repeat, piece and cell."""

    def measure(steps, made, repeat):
        for piece in range(steps[made.seed] + 1):
            with (tmp_path / "diary").open("a") as file:
                file.write(f"{repeat} {piece} {made.seed}\n")
            yield
        return ok_result(made.variant, repeat)

    steps = [random.Random(seed).randrange(1, 5) for _ in range(4)]
    run(2, partial(measure, steps), *(cell(seed=k) for k in range(4)))
    diary = diary_of(tmp_path)
    assert [line[:2] for line in diary] == sorted(line[:2] for line in diary)
    assert Counter(diary) == {(r, i, k): 1 for r in range(2) for k in range(4) for i in range(steps[k] + 1)}


# --- what turns are for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_busy_minute_meets_all_cells_alike(tmp_path, seed):
    """On a clock of our own a step takes three times as long for a minute; ratios are those of a quiet machine."""
    clock, chance = tmp_path / "clock", random.Random(seed)
    clock.write_text("0")
    lengths = {None: 1.0, "gpipe": chance.uniform(0.4, 0.9), "1f1b": chance.uniform(0.4, 0.9)}
    start = chance.uniform(0, 50)

    def measure(made, repeat):
        began, times = float(clock.read_text()), []
        for _ in range(made.steps):
            yield
            now = float(clock.read_text())
            times.append(lengths[made.schedule] * (3 if start < now < start + 60 else 1))
            clock.write_text(str(now + times[-1]))
        values = {"throughput_samples_per_s": made.batch_size / median(times), "device": "cpu Model X"}
        row = cell_row(made, repeat, experiment="ablation", started_utc=f"{began:09.3f}", **values)
        return RawResult(made.id, row, configuration=made.configuration)

    shared = {"checkpoint": "never", "transfer": "direct", "steps": 5}
    loop = cell(**{**shared, "partitions": 1, "balance": "29", "chunks": 1})
    cells = [loop, *(cell(**shared, schedule=name) for name in ("gpipe", "1f1b"))]
    (group,) = group_rows([result.row for result in run(5, measure, *cells)])
    assert group.in_turns
    for name in ("gpipe", "1f1b"):
        assert group.ratio(group.outcomes[name]).median == pytest.approx(1 / lengths[name])
