"""Simulations, cells, commands and advice on several hosts."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest

from gpipe_bench.cli import main
from gpipe_bench.errors import ConfigError
from gpipe_bench.simulator import Model, simulate
from gpipe_bench.suite.advice.advice import AdviceRequest, advise
from gpipe_bench.suite.emulated_cells import EmulatedCell
from gpipe_bench.suite.simulated_cells import SimulatedCell
from gpipe_bench.suite.validation import validated

UNET = Model("unet", {"depth": 2, "B": 2, "C": 64, "size": 128})
WORDS = "depth=2;B=2;C=64;size=128"


def step(**options):
    return simulate(UNET, **{"balance": [13, 12, 12, 12], "batch_size": 32, "chunks": 4} | options)


@pytest.mark.parametrize(("profile", "link"), [("h100", "nvlink"), ("v100", "nvlink"), ("p100", "pcie")])
def test_hosts_that_the_link_within_a_host_joins_are_one_host(profile, link):
    one, two = step(profile=profile), step(profile=profile, hosts=2, network=link)
    assert {**one.settings, "hosts": 2} == two.settings
    for name in (each.name for each in fields(one) if each.name not in ("events", "settings")):
        assert getattr(one, name) == getattr(two, name), name
    assert list(one.events) == list(two.events)


def test_a_slower_network_is_a_slower_step():
    times = [step(hosts=2, network=name).step_time_ms for name in ("ideal", "ndr400", "ethernet10")]
    assert times == sorted(times)
    assert times[-1] > times[0]


def test_hosts_are_counted_in_devices_and_not_in_partitions():
    options = {"schedule": "interleaved", "network": "ethernet10"}
    with pytest.raises(ConfigError, match="hosts must divide the 2 devices evenly, got 4"):
        step(**options, hosts=4)
    assert step(**options, hosts=2).step_time_ms > step(**options).step_time_ms


def test_a_full_device_is_told_of_on_several_hosts_too():
    many = simulate(UNET, balance=[25, 24], batch_size=2**20, hosts=2)
    assert many.status == "oom"
    assert many.reason.startswith("device 0 needs ")


def test_cells_on_one_host_keep_their_ids():
    cell, two = SimulatedCell(), SimulatedCell(hosts=2, network="hdr200")
    assert not {"hosts", "network"} & json.loads(cell.configuration).keys()
    assert json.loads(two.configuration)["hosts"] == 2
    assert json.loads(two.configuration)["network"] == "hdr200"
    assert cell.id == SimulatedCell(network="hdr200").id != two.id


def test_emulated_cells_have_one_host():
    with pytest.raises(ConfigError, match="hosts"):
        validated(EmulatedCell, {"hosts": 2}, lambda path: path[0])


def called(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        main([*words])
    printed = capsys.readouterr()
    return caught.value.code or 0, printed.out, printed.err


def test_the_command_says_where_it_simulates(capsys):
    given = ("simulate", "--model-args", WORDS, "--partitions", "4", "--batch-size", "8", "--hosts", "2")
    status, out, _ = called(capsys, *given, "--network", "ethernet10")
    assert status == 0
    assert "simulated on 4 x cuda Tesla P40 (p40) in 2 hosts over ethernet10" in out
    assert "published" not in out


@pytest.mark.parametrize("command", [("simulate", "--partitions"), ("advise", "--devices")])
def test_wrong_hosts_and_networks_are_named_by_their_options(capsys, command):
    status, _, err = called(capsys, *command, "4", "--hosts", "3", "--network", "ethernet1")
    assert status == 2
    assert [line[: line.index(" must")] for line in err.splitlines()] == ["error: --hosts", "error: --network"]


REQUEST = {
    "model_args": WORDS,
    "devices": 4,
    "hosts": 2,
    "batch_size": 32,
    "network": "ethernet10",
    "schedules": "1f1b",
}


def test_candidates_for_advice_use_as_few_hosts_as_they_need():
    request = AdviceRequest.model_validate(REQUEST | {"devices": 12, "hosts": 3})
    assert {(cell.partitions, cell.hosts) for cell in request.candidates()} == {(1, 1), (2, 1), (4, 1), (8, 2), (12, 3)}


def test_the_most_devices_are_as_many_on_each_host():
    # The model has 49 layers, and a host has 32 devices.
    request = AdviceRequest.model_validate(REQUEST | {"devices": 64})
    assert max(cell.partitions for cell in request.candidates()) == 48


def test_advice_says_what_the_network_costs(capsys, monkeypatch):
    advice = advise(AdviceRequest.model_validate(REQUEST))
    # One host is faster than two over this network, which costs more than what the second one brings.
    assert (advice.best.row.device_count, advice.spread.row.device_count) == (2, 4)
    assert advice.spread.row.throughput_samples_per_s < advice.best.row.throughput_samples_per_s
    assert advice.best.row.throughput_samples_per_s < advice.ideal_samples_per_s
    monkeypatch.setattr("gpipe_bench.suite.advice.advice.advise", lambda *_: advice)
    words = (f"--{name.replace('_', '-')}={value}" for name, value in REQUEST.items())
    out = " ".join(called(capsys, "advise", *words)[1].split())
    assert "simulated on up to 4 x p40 in 2 hosts over ethernet10" in out
    shown = r"on 4 devices of 2 hosts the network costs ([0-9.]+)%: ([0-9.]+) samples/s, and ([0-9.]+) with one"
    share, speed, ideal = map(float, re.search(shown, out).groups())
    assert share == pytest.approx(100 * (1 - speed / ideal), abs=0.1)
    assert ideal == pytest.approx(advice.ideal_samples_per_s, abs=0.06)


def test_advice_for_one_host_knows_no_network():
    advice = advise(AdviceRequest.model_validate(REQUEST | {"hosts": 1, "devices": 2}))
    assert (advice.spread, advice.ideal_samples_per_s) == (None, None)


def test_a_row_says_how_many_hosts_there_are():
    assert (step().row().hosts, step(hosts=2).row().hosts) == (1, 2)
