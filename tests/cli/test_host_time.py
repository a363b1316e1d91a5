"""The host's time of an operation is that of the profile, or what the user says."""

from __future__ import annotations

import json

import pytest

from gpipe_bench.cli import main
from gpipe_bench.cli.options import HOST_BOUND
from gpipe_bench.emulator.build import obstacle
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.suite.emulated_cells import EmulatedCell
from gpipe_bench.suite.simulated_cells import SimulatedCell
from tests.processes import command
from tests.project.tree import ROOT
from tests.suite.cells_of import in_file

TINY = {"model_args": "depth=1;B=1;C=8;size=16", "batch_size": 4}
WORDS = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))]
TABLE = ROOT / "results" / "reference" / "measured" / "1x-nvidia-h200" / "pipelines.csv"
SAID = "39.5 us of host time per operation"


@pytest.fixture
def call(capsys):
    """Run a command; gives exit status, what it printed, and its errors."""

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            main([*map(str, arguments)])
        return caught.value.code or 0, *capsys.readouterr()

    return run


def test_a_simulation_says_which_host_was_asked_for(call):
    status, out, _ = call("simulate", *WORDS, "--launch-us", 39.5)
    assert (status, f"autograd current, {SAID}\n" in out) == (0, True)
    assert SAID not in call("simulate", *WORDS)[1]


@pytest.mark.parametrize("kind", [SimulatedCell, EmulatedCell])
def test_a_cell_has_it_in_its_key_only_where_it_is_said(kind):
    cell = kind(**TINY, balance="auto")
    assert cell.changed(launch_us=10).config_sha256 != cell.config_sha256
    assert cell.changed(launch_us=10).settings() == {**cell.settings(), "launch_us": 10.0}


def test_all_cells_of_a_file_have_it(call, tmp_path):
    out = tmp_path / "out.json"
    cells = [SimulatedCell(**TINY, chunks=chunks, partitions=1, balance="17", profile="h200") for chunks in (1, 2)]
    status, words, _ = call("simulate", *in_file(tmp_path, *cells), "--launch-us", 39.5, "--out", out)
    assert (status, "with 2 simulated cells, 2 of them bound by the host" in words) == (0, True)
    found = json.loads(out.read_text())
    assert [one["cell"] for one in found] == [cell.changed(launch_us=39.5).id for cell in cells]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--launch-us", "-2"), "--launch-us must be more than 0 and at most 1000000, got -2.0; use microseconds"),
        (("--launch-us", "inf"), "--launch-us must be more than 0 and at most 1000000, got inf; use microseconds"),
        (
            ("--launch-us", "1e7"),
            "--launch-us must be more than 0 and at most 1000000, got 10000000.0; use microseconds",
        ),
    ],
)
def test_a_wrong_one_is_a_line(call, words, problem, tmp_path):
    for command_words in (("simulate", *WORDS), ("emulate",), ("emulate", "script.py"), ("advise", *WORDS)):
        assert call(*command_words, *words)[::2] == (2, f"error: {problem}\n")
    file = ("simulate", "--cells", TABLE, "--profile", "h200", "--out", tmp_path / "out.json")
    assert call(*file, *words)[::2] == (2, f"error: {problem}\n")


def test_advice_for_another_host_is_another(call):
    words = ("advise", *WORDS, "--profile", "h200", "--devices", 1)
    (speed, other) = (float(call(*words, *more)[1].split(" samples/s simulated")[0].split()[-1])
                      for more in ((), ("--launch-us", load_profile("h200").host_us * 2)))  # fmt: skip
    assert other == pytest.approx(speed / 2, rel=0.02)
    assert f"1 x h200, {SAID}," in " ".join(call(*words, "--launch-us", 39.5)[1].split())


def test_a_step_of_a_schedule_has_it(call):
    words = call("simulate", *WORDS, "--schedule", "gpipe", "--devices", 2, "--chunks", 2, "--launch-us", 39.5)[1]
    assert f"schedule gpipe, autograd current, {SAID}\n" in words
    assert HOST_BOUND in words


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_an_emulation_has_it(tmp_path):
    run = command(["emulate", *WORDS, "--partitions", 1, "--balance", "17", "--launch-us", 1000], ROOT)
    assert "1000 us of host time per operation\nemulated on 1 x" in run.stdout
    assert "\nerror of simulated samples/s on p40: " in run.stdout
    script, trace = ROOT / "examples" / "emulated" / "planted_race.py", tmp_path / "trace.json"
    run = command(["emulate", script, "--devices", 2, "--launch-us", 39.5, "--trace", trace], ROOT)
    assert f"(h100), {SAID}; values are not computed\n" in run.stdout
    assert HOST_BOUND not in run.stdout
    assert HOST_BOUND in command(["emulate", script, "--devices", 2, "--launch-us", 1000], ROOT).stdout
    assert json.loads(trace.read_text())["otherData"]["launch_us"] == 39.5
