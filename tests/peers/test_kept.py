"""A race that is cut off keeps its finished cases, and the next one goes on with them."""

from __future__ import annotations

import csv
import json

import pytest
from typer.testing import CliRunner

from gpipe_bench.bench.peers import race
from gpipe_bench.bench.peers.kept import KeptCases, race_key
from gpipe_bench.bench.peers.settings import PeersSettings
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.cli.app import application
from tests.peers.cases_of import outcome, raced, tiny_cells, tiny_unet

FACTS = {"device": "cpu Some CPU"}


def finished():
    cells, unet = tiny_cells(), tiny_unet()
    lost = outcome(unet, "torchgpipe", [], status="error", reason="boom")
    return [
        raced(cells, [outcome(cells, "loop", [0.1, 0.2], gradient_difference=1e-9, peak_bytes=7)]),
        raced(unet, [outcome(unet, "plain", [0.3]), lost], alone=[[0.1, 0.2]], one_way_s=[0.5]),
    ]


@pytest.fixture
def path(tmp_path):
    """The file of a race with two finished cases."""
    path = tmp_path / "peers_cases.jsonl"
    kept = KeptCases(path, {"seed": 0}, pytest.fail)
    kept.begin(FACTS)
    for one in finished():
        kept.add(one)
    return path


def test_finished_cases_come_back_as_they_were(path):
    said = []
    kept = KeptCases(path, {"seed": 0}, said.append)
    assert kept.facts == FACTS
    assert [kept.get(one.case) for one in finished()] == finished()
    assert kept.get(tiny_cells(chunks=2)) is None
    assert said == [f"going on with a race that was cut off: 2 cases are in {path}; remove it to begin anew"]


def test_a_line_cut_short_is_left_out(path):
    path.write_text(path.read_text()[:-20])
    kept = KeptCases(path, {"seed": 0}, lambda _: None)
    assert [kept.get(one.case) is None for one in finished()] == [False, True]


def test_cases_after_a_line_cut_short_are_kept_too(path):
    path.write_text(path.read_text()[:-20])
    KeptCases(path, {"seed": 0}, lambda _: None).add(finished()[1])
    kept = KeptCases(path, {"seed": 0}, lambda _: None)
    assert [kept.get(one.case) for one in finished()] == finished()


@pytest.mark.parametrize("text", ["", "no json\n", "[1]\n"])
def test_what_is_no_race_is_put_aside(tmp_path, text):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    assert KeptCases(path, {"seed": 0}, lambda _: None).facts == {}
    assert (tmp_path / "x_1.jsonl").read_text() == text


def test_the_cases_of_another_race_are_put_aside_and_never_overwritten(path):
    said, text = [], path.read_text()
    path.with_name("peers_cases_1.jsonl").write_text("older")
    kept = KeptCases(path, {"seed": 1}, said.append)
    assert (kept.facts, kept.get(tiny_cells())) == ({}, None)
    assert path.with_name("peers_cases_2.jsonl").read_text() == text
    assert path.with_name("peers_cases_1.jsonl").read_text() == "older"
    assert "peers_cases_2.jsonl" in said[0]


def test_nothing_is_left_when_the_table_is_written(path):
    KeptCases(path, {"seed": 0}, lambda _: None).remove()
    assert not path.exists()


def test_settings_and_machine_tell_races_apart():
    keys = [
        race_key(settings, machine)
        for settings, machine in [
            (PeersSettings(), Machine("cpu", 1)),
            (PeersSettings(seed=1), Machine("cpu", 1)),
            (PeersSettings(), Machine("cuda", 1)),
        ]
    ]
    assert json.loads(json.dumps(keys[0])) == keys[0]
    assert keys[0] == race_key(PeersSettings(), Machine("cpu", 1))
    assert keys[0] not in keys[1:]


def test_the_command_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    settings = ("--quick", "--set", 'contenders=["loop"]', "--set", "cells.rounds=1")
    words = ["peers", "run", *settings, "--out", str(tmp_path / "peers.csv")]
    whole, ran = race._race, []

    def cut_off(case, *rest):
        ran.append(case.workload)
        if case.workload == "unet" and ran.count("unet") == 1:
            raise KeyboardInterrupt
        return whole(case, *rest)

    monkeypatch.setattr(race, "_race", cut_off)
    assert CliRunner().invoke(application(), words).exit_code != 0
    assert not (tmp_path / "peers.csv").exists()
    done = CliRunner().invoke(application(), words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "going on with a race that was cut off: 3 cases are in" in done.output
    assert ran == ["cells", "combinations", "convnet", "unet", "unet", "decoder"]
    with (tmp_path / "peers.csv").open(newline="") as file:
        rows = [
            [row[name] for name in ("contender", "workload", "status", "gradients")] for row in csv.DictReader(file)
        ]
    assert rows == [["loop", workload, "ok", ""] for workload in ("cells", "convnet", "unet", "decoder")]
    assert done.output.splitlines()[-1] == f"wrote {tmp_path / 'peers.csv'}"
    assert not list(tmp_path.glob("*.jsonl"))
