"""Settings of the race, its cases and its contenders."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from gpipe_bench.bench.experiments.config import parse_config
from gpipe_bench.bench.experiments.workflow import make_plan
from gpipe_bench.bench.peers.cases import PeerCase
from gpipe_bench.bench.peers.contenders import BASELINES, CONTENDERS, REFERENCE, contenders_of
from gpipe_bench.bench.peers.settings import QUICK, PeersSettings
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.cli.app import application
from gpipe_bench.cli.peers import _settings
from gpipe_bench.components import Components
from gpipe_bench.errors import ConfigError
from tests.project.tree import ROOT

CPU = Machine("cpu", 1)


def problem(**peers):
    with pytest.raises(ConfigError) as caught:
        parse_config({"peers": peers})
    return "; ".join(caught.value.problems)


def test_an_unknown_contender_is_told_the_nearest():
    text = problem(contenders=["torchgpip"])
    assert "peers.contenders must be one of all, engine-autograd, " in text
    assert "got 'torchgpip'; did you mean torchgpipe?" in text or "got 'torchgpip'" in text


def test_micro_batches_must_be_equal():
    assert "peers.unet.batch_size must be a multiple of chunks = 8, got 30; change either" in problem(
        unet={"batch_size": 30}
    )


def test_a_model_must_be_one_of_the_race():
    assert "peers.convnet.model must be one of tiny, convnet, unet, gpt2, got 'resnet'" in problem(
        convnet={"model": "resnet"}
    )


def test_partitions_must_have_layers():
    assert "peers.convnet.partitions must be at most half the 21 layers of convnet, got 11; lower it" in problem(
        convnet={"partitions": 11}
    )


def test_arguments_of_a_model_are_checked():
    assert "depth" in problem(unet={"model_args": "dept=2"})


def test_cases_are_the_grid_and_the_networks():
    cases = PeersSettings().cases(CPU)
    assert len([case for case in cases if case.workload == "cells"]) == 4 * 3 * 3
    combinations = [(case.checkpoint, case.variant) for case in cases if case.workload == "combinations"]
    assert combinations == [(mode, each.label) for mode in ("always", "never") for each in Components.factorial()]
    networks = [(case.workload, case.checkpoint) for case in cases if not case.tiny]
    assert networks == [(name, mode) for name in ("convnet", "unet", "decoder") for mode in ("always", "never")]
    assert len({case.id for case in cases}) == len(cases)


def test_a_case_survives_its_journey_as_json():
    for case in QUICK.cases(CPU):
        assert TypeAdapter(PeerCase).validate_python(json.loads(json.dumps(asdict(case)))) == case


def test_neighbours_share_devices_that_are_too_few():
    case = PeersSettings().cases(Machine("cuda", 2))[9]
    assert (case.partitions, case.placement()) == (8, ["cuda:0"] * 4 + ["cuda:1"] * 4)
    assert case.parallel == 2


def test_only_what_differs_travels_to_the_command():
    assert PeersSettings().changes() == []
    changed = PeersSettings.model_validate({"seed": 3, "cells": {"partitions": [2], "rounds": 4}})
    words = changed.changes()
    assert words == ["--set", "seed=3", "--set", "cells.partitions=[2]", "--set", "cells.rounds=4"]
    assert _settings(words[1::2], PeersSettings()) == changed


def test_the_plan_has_the_options_of_the_race():
    plan = make_plan({"device": "cpu", "peers": {"cells": {"rounds": 4}}}, [])
    assert plan.racing == ["--device", "cpu", "--set", "cells.rounds=4"]
    assert plan.racing_gpus == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "cells"], "--set must be like cells.rounds=30, got 'cells'; write section.key=value"),
        (["--set", "cells.rounds=0"], "--set cells.rounds must be at least 1, got 0; raise it"),
        (["--set", "seed.x=1"], "--set must name a setting, got 'seed.x'; seed has none"),
        (["--set", "cels.rounds=3"], "--set cels must be a known key, got 'cels'; did you mean cells?"),
    ],
)
def test_a_wrong_option_is_one_clear_error(words, said, tmp_path):
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(
            application(), ["peers", "run", "--out", str(tmp_path / "x.csv"), *words], catch_exceptions=False
        )
    assert len(caught.value.problems) == 1
    assert said.split("; did")[0] in caught.value.problems[0]
    assert not (tmp_path / "x.csv").exists()


def test_combinations_are_a_matter_of_the_papers_executor_and_its_baseline():
    names = [contender.name for contender in CONTENDERS.values() if contender.runs("combinations")]
    assert names == ["engine-autograd", "torchgpipe", "plain"]


def test_networks_are_for_all_and_tiny_layers_for_those_without_further_schedules():
    assert [name for name, one in CONTENDERS.items() if not one.runs("cells")] == [
        *("engine-step-gpipe", "engine-1f1b", "engine-interleaved", "engine-zb-h1"),
        *("distributed-interleaved", "distributed-zb-v"),
        *("pipelining-interleaved", "pipelining-zero-bubble", "pipelining-zb-v", "loop-processes"),
    ]
    assert [name for name, one in CONTENDERS.items() if not one.runs("unet")] == [
        *("engine-autograd-one-thread", "engine-scheduled-one-thread")
    ]


def test_a_combination_must_be_one():
    assert "peers.combinations.variants must be published, factorial or labels" in problem(
        combinations={"variants": ["dep-x"]}
    )


def test_names_of_contenders():
    assert [c.name for c in contenders_of(["loop", "engine-scheduled"])] == ["engine-scheduled", "loop"]
    assert len(contenders_of(["all"])) == len(CONTENDERS)
    assert {*BASELINES, REFERENCE} <= set(CONTENDERS)


def test_the_pins_of_optional_peers_are_said_once_each():
    pins = [line for line in (ROOT / "requirements" / "peers.lock").read_text().splitlines() if "==" in line]
    assert pins == [f"{c.package}=={c.version}" for c in CONTENDERS.values() if c.kind == "rival"]
    assert "requirements/peers.lock" in (ROOT / "Makefile").read_text()
