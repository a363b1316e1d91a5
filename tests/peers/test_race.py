"""The race with contenders that are no processes: turns, order, failures."""

from __future__ import annotations

import numpy as np
import pytest

from gpipe_bench.bench.peers import race
from gpipe_bench.bench.peers.client import PeerError
from gpipe_bench.bench.peers.contenders import contenders_of
from gpipe_bench.bench.peers.race import _race
from tests.peers.cases_of import tiny_cells, tiny_unet

NAMES = ("engine-scheduled", "torchgpipe", "plain", "loop")


class Stub:
    """Answers like a child, and writes down in which order everybody was asked."""

    def __init__(self, name, diary, fails=""):
        self.name, self._diary, self._fails = name, diary, fails
        self.asked = []

    def ready(self):
        if self._fails == "ready":
            raise PeerError("skipped", "not installed")
        return {"version": "1.0"}

    def ask(self, do, **arguments):
        self._diary.append((self.name, do, arguments.get("steps"), arguments.get("count")))
        self.asked.append((do, arguments))
        if do == self._fails or (do == "run" and arguments["steps"] == 2 and self._fails == "timed"):
            raise PeerError("error", f"{do} failed")
        if self._fails == "count" and arguments.get("count"):
            raise PeerError("error", "too slow")
        if do == "gradients":
            np.savez(arguments["path"], np.full(3, 2.0), np.array([1.0 if self.name == "plain" else 1.5]))
        times = [0.1] * arguments.get("steps", 0)
        balance = [1] * (arguments["case"].partitions if "case" in arguments else 0)
        return {"wall_s": times, "cpu_s": times, "bytes": 7, "forward_passes": 2.0, "balance": balance}

    def close(self):
        self._diary.append((self.name, "close", None, None))


def ran(tmp_path, fails=None, **changes):
    diary = []
    made = {name: Stub(name, diary, (fails or {}).get(name, "")) for name in NAMES}
    done = _race(tiny_cells(rounds=6, visit_s=0.25, **changes), contenders_of(NAMES), made, tmp_path)
    return {outcome.contender.name: outcome for outcome in done.outcomes}, diary


def timed(diary):
    return [name for name, do, steps, _ in diary if do == "run" and steps == 2]


def test_in_every_round_everybody_runs_once(tmp_path):
    outcomes, diary = ran(tmp_path)
    turns = timed(diary)
    rounds = [turns[k : k + 4] for k in range(0, len(turns), 4)]
    assert len(rounds) == 6
    assert all(sorted(names) == sorted(NAMES) for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1, "the order is drawn anew"
    for name, outcome in outcomes.items():
        assert [visit.round for visit in outcome.visits] == list(range(6))
        assert [visit.position for visit in outcome.visits] == [names.index(name) for names in rounds]
        assert all(len(visit.wall_s) == 2 for visit in outcome.visits)


def test_the_order_follows_from_the_seed(tmp_path):
    assert timed(ran(tmp_path)[1]) == timed(ran(tmp_path)[1])
    assert timed(ran(tmp_path)[1]) != timed(ran(tmp_path, seed=1)[1])


def test_all_are_opened_and_warm_before_anybody_is_timed(tmp_path):
    _, diary = ran(tmp_path)
    first = next(k for k, (_, do, steps, _) in enumerate(diary) if do == "run" and steps == 2)
    assert [(name, do) for name, do, _, _ in diary[:first]] == [(name, do) for name in NAMES for do in ("open", "run")]


@pytest.mark.parametrize(("visit_s", "asked"), [(0.25, (1, 2)), (0.1, (1, 1)), (0.05, (1, 1)), (99.0, (1, 50))])
def test_a_visit_has_as_many_steps_as_fit(visit_s, asked):
    stub = Stub("loop", [])
    outcome = race.Outcome(tiny_cells(visit_s=visit_s), contenders_of(["loop"])[0])
    race._open(stub, outcome)
    race._visit(stub, outcome, 0, 0)
    _, arguments = stub.asked[-1]
    assert (arguments["warmup"], arguments["steps"]) == asked
    assert len(outcome.visits[0].wall_s) == asked[1]


def test_every_stage_of_a_case_is_a_fork_of_its_own(tmp_path):
    _, diary = ran(tmp_path)
    for name in NAMES:
        own = [do for who, do, _, _ in diary if who == name and do in {"open", "close", "gradients", "peak"}]
        assert own == ["open", "close", "open", "gradients", "close", "open", "peak", "close"]


def test_gradients_are_taken_in_float64_in_a_fork_of_their_own(tmp_path):
    stub = Stub("loop", [])
    race._save_gradients(stub, race.Outcome(tiny_cells(), contenders_of(["loop"])[0]), tmp_path)
    (first, opened), (second, _) = stub.asked
    assert (first, opened["case"].precision, second) == ("open", "float64", "gradients")


def test_contenders_with_two_partitions_per_device_have_a_balance_of_their_own(tmp_path):
    names = ("pipelining-gpipe", "pipelining-interleaved", "plain")
    case = tiny_unet(fine_balance=(7, 7, 7, 8))
    done = _race(case, contenders_of(names), {name: Stub(name, []) for name in names}, tmp_path)
    balances = {outcome.contender.name: outcome.case.balance for outcome in done.outcomes}
    assert balances == {"pipelining-gpipe": (14, 15), "pipelining-interleaved": (7, 7, 7, 8), "plain": (14, 15)}


@pytest.mark.parametrize(("name", "asked"), [("loop", [2]), ("pipelining-interleaved", [2, 4])])
def test_the_probe_finds_the_balances_that_are_missing_and_needed(name, asked):
    probe = Stub("probe", [])
    found = race._balanced(tiny_unet(balance=()), contenders_of([name]), probe, 0.1)
    assert [arguments["case"].partitions for _, arguments in probe.asked] == asked
    assert [len(found.balance), len(found.fine_balance)] == [2, 4 if 4 in asked else 0]
    assert race._balanced(tiny_unet(), contenders_of([name]), probe, 0.1) == tiny_unet()


def test_nothing_is_counted_while_others_are_timed(tmp_path):
    outcomes, diary = ran(tmp_path)
    counted = [k for k, entry in enumerate(diary) if entry[3]]
    last = max(k for k, (_, do, steps, _) in enumerate(diary) if do == "run" and steps == 2)
    assert len(counted) == 4
    assert min(counted) > last
    assert {outcome.peak_bytes for outcome in outcomes.values()} == {7}


@pytest.mark.parametrize(("where", "status"), [("ready", "skipped"), ("open", "error"), ("timed", "error")])
def test_one_that_fails_is_out_and_the_others_go_on(tmp_path, where, status):
    outcomes, diary = ran(tmp_path, {"torchgpipe": where})
    assert outcomes["torchgpipe"].status == status
    assert outcomes["torchgpipe"].reason
    assert [outcomes[name].status for name in NAMES if name != "torchgpipe"] == ["ok"] * 3
    assert timed(diary).count("torchgpipe") <= 1
    assert outcomes["loop"].gradient_difference is not None
    assert outcomes["torchgpipe"].peak_bytes is None


def test_memory_that_cannot_be_counted_costs_no_times(tmp_path):
    outcomes, _ = ran(tmp_path, {"loop": "count"})
    assert (outcomes["loop"].status, outcomes["loop"].peak_bytes, len(outcomes["loop"].visits)) == ("ok", None, 6)
    assert outcomes["loop"].reason == "live bytes could not be counted: too slow"


def test_gradients_are_compared_with_the_plain_module(tmp_path):
    outcomes, _ = ran(tmp_path)
    assert outcomes["plain"].gradient_difference == 0.0
    assert outcomes["loop"].gradient_difference == 0.25, "largest difference 0.5 over largest value 2"


def test_without_the_plain_module_there_is_nothing_to_compare_with(tmp_path):
    outcomes, _ = ran(tmp_path, {"plain": "open"})
    assert outcomes["loop"].gradient_difference is None


def test_gradients_of_other_shapes_or_that_are_no_numbers_are_no_match():
    assert race._difference([np.ones(2)], [np.ones(3)]) == np.inf
    assert race._difference([np.array([np.nan])], [np.ones(1)]) == np.inf
    assert race._difference([np.ones(1)], [np.zeros(1)]) == np.inf
    assert race._difference([np.zeros(1)], [np.zeros(1)]) == 0
