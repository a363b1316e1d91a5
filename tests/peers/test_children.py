"""Processes of contenders: what they answer, and what becomes of them when they fail."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from gpipe_bench.bench.peers import child, race
from gpipe_bench.bench.peers.client import PeerError, children
from gpipe_bench.bench.peers.contenders import CONTENDERS, Contender
from tests.peers.cases_of import tiny_cells, tiny_decoder, tiny_unet

TWO_PER_PROCESS = (
    *("distributed-interleaved", "distributed-zb-v"),
    *("pipelining-interleaved", "pipelining-zero-bubble", "pipelining-zb-v"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    names = ["plain", "loop", "probe", "distributed-zb-h1", *TWO_PER_PROCESS]
    with children(names, tmp_path_factory.mktemp("log") / "log.txt", 60.0) as found:
        yield found


def opened(contender, case, **changes):
    return contender.ask("open", **{"case": case, "count": False, **changes})


def test_contenders_live_in_processes_of_their_own(made):
    pids = {contender.ready()["pid"] for contender in made.values()}
    assert len(pids) == len(made)
    assert os.getpid() not in pids


def test_a_contender_trains_and_saves_its_gradients(made, tmp_path):
    for name in ("plain", "loop"):
        opened(made[name], tiny_unet())
        answer = made[name].ask("run", warmup=1, steps=3)
        assert len(answer["wall_s"]) == len(answer["cpu_s"]) == 3
        assert min(answer["wall_s"]) > 0
        made[name].ask("gradients", path=str(tmp_path / f"{name}.npz"))
        made[name].close()
    with np.load(tmp_path / "plain.npz") as plain, np.load(tmp_path / "loop.npz") as loop:
        assert plain.files == loop.files
        for key in plain.files:
            np.testing.assert_allclose(loop[key], plain[key], atol=1e-6)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_two_stages_per_process_give_the_gradients_of_the_plain_module(made, tmp_path, checkpoint):
    """The third stage ends in a view, and hands on a skip of the first."""
    case = tiny_unet(checkpoint=checkpoint, balance=(7, 7, 7, 8), precision="float64")
    passes = passes_of_equal_gradients(made, TWO_PER_PROCESS, case, tmp_path)
    others = ("distributed-interleaved", "distributed-zb-v", "pipelining-interleaved")
    assert {passes[name] for name in others} == {2 if checkpoint == "always" else 1}


def test_a_decoder_across_processes_has_the_gradients_and_the_passes_of_the_loop(made, tmp_path):
    """Its embedding of places is given no batch."""
    passes = passes_of_equal_gradients(made, ("loop", "distributed-zb-h1"), tiny_decoder(precision="float64"), tmp_path)
    assert passes == {"loop": 2, "distributed-zb-h1": 2}


def passes_of_equal_gradients(made, names, case, folder):
    """Forward passes of contenders whose gradients are those of the plain module."""
    passes = {}
    for name in ("plain", *names):
        opened(made[name], case)
        passes[name] = made[name].ask("gradients", path=str(folder / f"{name}.npz"))["forward_passes"]
        made[name].close()
    assert passes.pop("plain") == 1
    wanted = race._gradients(folder / "plain.npz")
    assert [name for name in names if race._difference(race._gradients(folder / f"{name}.npz"), wanted) > 1e-12] == []
    return passes


def test_processes_of_a_pipeline_hold_their_own_parts_only(made):
    case = tiny_decoder(checkpoint="never", model_args="L=1;D=64;heads=2;vocabulary=2048;context=6;dropout=0")
    peaks = {}
    for name in ("loop", "distributed-zb-h1"):
        opened(made[name], case, count=True)
        made[name].ask("run", warmup=2, steps=0)
        peaks[name] = made[name].ask("peak")["bytes"]
        made[name].close()
    assert 0 < peaks["distributed-zb-h1"] < 1.35 * peaks["loop"]


def test_a_checkpointed_loop_holds_less_than_the_whole_batch(made):
    peaks = {}
    for name in ("plain", "loop"):
        opened(made[name], tiny_unet(), count=True)
        made[name].ask("run", warmup=2, steps=0)
        peaks[name] = made[name].ask("peak")["bytes"]
        made[name].close()
    assert 0 < peaks["loop"] < peaks["plain"]


def test_a_failure_is_told_and_spares_the_next_case(made):
    with pytest.raises(PeerError, match="L of tiny must be an integer, at least 1") as caught:
        opened(made["plain"], tiny_cells(model_args="L=0;width=4"))
    assert caught.value.status == "error"
    opened(made["plain"], tiny_cells())
    made["plain"].close()


def test_what_kills_a_case_is_an_error_and_the_next_begins_anew(made):
    before = made["loop"].ready()["pid"]
    opened(made["loop"], tiny_cells())
    os.killpg(before, signal.SIGKILL)
    with pytest.raises(PeerError, match="the process of loop is gone"):
        made["loop"].ask("run", warmup=0, steps=1)
    assert made["loop"].ready()["pid"] != before
    opened(made["loop"], tiny_cells())
    made["loop"].close()


def test_one_that_hangs_is_ended(made):
    pid = made["plain"].ready()["pid"]
    opened(made["plain"], tiny_cells())
    os.killpg(pid, signal.SIGSTOP)
    made["plain"]._timeout_s = 0.2
    with pytest.raises(PeerError, match=r"plain gave no answer within 0\.2 s"):
        made["plain"].ask("run", warmup=0, steps=1)
    made["plain"]._timeout_s = 60.0
    assert _gone(pid)


def _gone(pid):
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)  # until its parent has taken note
    return False


def test_the_probe_balances_and_times_partitions(made):
    probe, case = made["probe"], tiny_unet(balance=())
    balance = probe.ask("balance", case=case, seconds=0.05)["balance"]
    probe.close()
    assert (len(balance), sum(balance)) == (2, 29)
    found = probe.ask("partitions", case=tiny_unet(), seconds=0.05)
    probe.close()
    assert [len(part) for part in found["alone"]] == [2, 2]
    assert min(min(part) for part in found["alone"]) > 0
    found = probe.ask("transfers", case=tiny_unet(), seconds=0.05)
    probe.close()
    assert len(found["one_way_s"]) == 1
    assert found["one_way_s"][0] >= 0


def test_a_package_that_is_not_installed_is_skipped_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setitem(CONTENDERS, "absent", Contender("absent", "rival", "no_such_package", "1.2"))
    answer = child._load("absent")
    assert answer["status"] == "skipped"
    assert answer["reason"].startswith("no_such_package is not installed; make peers")
    assert "no_such_package==1.2" in answer["reason"]


def test_a_package_that_is_broken_is_not_taken_for_an_absent_one(monkeypatch, tmp_path):
    (tmp_path / "broken_peer.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(CONTENDERS, "broken", Contender("broken", "rival", "broken_peer", "1.2"))
    answer = child._load("broken")
    assert answer["status"] == "skipped"
    assert "no_such_dependency" in answer["reason"]
