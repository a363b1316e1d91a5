"""``schedule``, and ``--schedule`` of other commands: what is printed of a name and of a file, and the errors."""

from __future__ import annotations

import csv
import subprocess
import sys
from functools import partial

import pytest

from gpipe_bench.cli import main
from gpipe_bench.emulator.build import obstacle
from gpipe_bench.schedules import SCHEDULES, Durations, drawn, named_schedule, read_csv, timing, to_csv
from gpipe_bench.schedules.table import partition_count

REASON = obstacle()


@pytest.fixture
def command_line(capsys):
    """Run a command; gives exit status, what it printed, and its errors."""

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            main([*map(str, arguments)])
        printed = capsys.readouterr()
        return caught.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture
def call(command_line):
    """The same for ``schedule``."""
    return partial(command_line, "schedule")


def test_facts_of_a_name(call):
    status, out, _ = call("check", "zb_v", "--devices", 4, "--microbatches", 8)
    assert status == 0
    assert "4 devices, 8 partitions, on devices 0 1 2 3 3 2 1 0" in out
    assert "most in flight on each device: 8 8 8 8" in out
    assert "5.88%" in out


def test_skips_may_make_messages_cross(call):
    crossing = (
        "messages cross: gradient of micro-batch 1 to partition 2 is needed before gradient of skip 0 of micro-batch 0"
    )
    assert crossing in call("check", "interleaved", "--devices", 2, "--skip", "0-3")[1]
    assert "cross" not in call("check", "1f1b", "--skip", "0-3")[1]
    assert "a skip must be two partitions, got '3'; write it as in --skip 0-3" in call("check", "1f1b", "--skip", 3)[2]
    assert "got one from 3 to 1 of 4 partitions" in call("check", "1f1b", "--skip", "3-1")[2]


def test_each_problem_of_a_file_has_a_line(call, tmp_path):
    (tmp_path / "own.csv").write_text("0F0,0X1\n1F0,1Q1\n")
    status, out, err = call("check", tmp_path / "own.csv")
    assert (status, out) == (2, "")
    rule = "error: a field must be a stage, one of F, B, I, W, and a micro-batch, such as 0F3, got"
    assert err.splitlines() == [f"{rule} '0X1' in line 1; correct it", f"{rule} '1Q1' in line 2; correct it"]


def test_a_file_is_read_as_it_was_written(call, tmp_path):
    file = tmp_path / "own.csv"
    assert call("write", "gpipe", "--microbatches", 1, "--devices", 2, "--messages", "--out", file)[0] == 0
    assert file.read_text() == "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    assert call("write", "interleaved", "--per-device", 3, "--devices", 2, "--out", file)[0] == 0
    assert read_csv(file.read_text()) == named_schedule("interleaved", 8, 6, 2)
    assert call("draw", file) == call("draw", "interleaved", "--per-device", 3, "--devices", 2)


def test_a_drawing(call):
    assert call("draw", "1f1b", "--devices", 2, "--microbatches", 2)[1] == drawn(named_schedule("1f1b", 2, 2, 2)) + "\n"


def test_times_of_each_action(call, tmp_path):
    out = tmp_path / "times.csv"
    options = ("--forward", 2, "--inputs", 3, "--weights", 1, "--transfer", 0.5, "--out", out)
    status, text, _ = call("time", "gpipe", "--devices", 2, "--microbatches", 1, *options)
    assert status == 0
    assert "makespan 13\n" in text
    assert "span of each device: 13 6; busy: 6 6" in text
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["kind"], float(row["start"]), float(row["end"])) for row in rows] == [
        ("F", 0, 2),
        ("B", 9, 13),
        ("F", 2.5, 4.5),
        ("B", 4.5, 8.5),
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_times_of_partitions_and_overlap_are_those_of_timing(call, name):
    schedule = named_schedule(name, 8, partition_count(name, 4), 4)
    n = schedule.partitions
    each = [Durations(1 + j, 2, 0.5 + j % 3) for j in range(n)]
    forward, weights = (",".join(f"{getattr(own, kind):g}" for own in each) for kind in ("forward", "weights"))
    options = ("--forward", forward, "--inputs", 2, "--weights", weights, "--overlap", 0.8)
    status, text, error = call("time", name, "--devices", 4, "--microbatches", 8, *options)
    found = timing(schedule, each, 0.0, 0.8)
    assert status == 0
    assert text.startswith(f"makespan {found.makespan:g}\n")
    assert f"busy: {' '.join(f'{one:g}' for one in found.busy)}\n" in text
    assert ("has no pairs" in error) == (not schedule.pairs)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["time", "1f1b", "--forward", "1,2"], "--forward must be one number, or one for each of the 4 partitions"),
        (["time", "zb_v", "--weights", "1,2,3,4"], "--weights must be one number, or one for each of the 8 partitions"),
        (
            ["time", "1f1b", "--inputs", "x"],
            "--inputs must be one number, or one for each of the 4 partitions, got 'x'",
        ),
        (["time", "1f1b", "--inputs", "nan"], "durations must be 0 or more, got 1.0, nan, 1.0"),
        (["time", "dualpipe_v", "--overlap", "-1"], "overlap must be 0 or more, got -1.0"),
        (["check", "1f1c"], "a schedule must be one of gpipe, 1f1b"),
        (["time", "1f1b", "--forward", "-1"], "durations must be 0 or more, got -1.0"),
        (["check", "v_min", "--microbatches", 0], "whole numbers of at least 1, got m = 0"),
    ],
)
def test_errors(call, words, error):
    status, _, err = call(*words)
    assert status == 2
    assert error in err


def test_a_file_that_cannot_run_names_its_actions(call, tmp_path):
    file = tmp_path / "own.csv"
    file.write_text(to_csv(named_schedule("gpipe", 2, 2, 2)).replace("1B0", ""))
    status, _, err = call("check", file)
    assert status == 2
    assert "the backward pass of micro-batch 0 on partition 1 must be B, or I and W, got none" in err


SMALL = ("--model", "gpt2", "--model-args", "L=1;D=8;heads=2;vocabulary=8;context=4;dropout=0", "--balance", "2-2")


@pytest.fixture
def own(tmp_path):
    """A schedule of three micro-batches and two partitions, in a file."""
    file = tmp_path / "own.csv"
    file.write_text(to_csv(named_schedule("1f1b", 3, 2, 2)))
    return file


@pytest.mark.parametrize("command", ["simulate", "run"])
def test_a_step_of_a_file_is_traced_and_explained_against_its_schedule(command_line, tmp_path, own, command):
    trace, table = tmp_path / "trace.json", tmp_path / "actions.csv"
    words = ("--schedule", own, *SMALL, "--batch-size", 6, "--trace", trace, "--out", tmp_path / "raw.json")
    status, text, _ = command_line(command, *words)
    assert status == 0
    assert "own.csv" in text
    status, text, error = command_line("explain", trace, "--against", own, "--out", table)
    assert (status, error) == (0, "")
    assert "from the first action to the last" in text
    with table.open() as lines:
        rows = list(csv.DictReader(lines))
    # Without the last micro-batch, which except_last does not checkpoint, each has a recomputation.
    assert sorted(row["kind"] for row in rows) == sorted(2 * (3 * "FB" + 2 * "R"))
    for row in rows:
        assert float(row["late_ms"]) == pytest.approx(float(row["start_ms"]) - float(row["other_start_ms"]), abs=1e-5)
    assert "no action is more than" in command_line("explain", trace, "--against", trace)[1]


def test_the_file_of_a_schedule_says_chunks_and_partitions(command_line, tmp_path, own):
    status, _, error = command_line("simulate", "--schedule", own, *SMALL, "--chunks", 4, "--batch-size", 8)
    assert status == 2
    assert f"--schedule must be for 4 micro-batches and 2 partitions, got one for 3 and 2 in {own}; change" in error
    own.write_text("0F0,0B0\n1B0,1F0\n")
    status, _, error = command_line("simulate", "--schedule", own, *SMALL)
    assert status == 2
    assert "F(0,1) must come before B(0,1)" in error
    missing = command_line("run", "--schedule", "none.csv", "--out", tmp_path / "raw.json")[2]
    assert "got 'none.csv': No such file or directory; correct the path" in missing


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_step_of_a_file_is_emulated(tmp_path, own):
    command = [sys.executable, "-m", "gpipe_bench", "emulate", "--schedule", str(own), *SMALL, "--batch-size", "6"]
    done = subprocess.run(
        [*command, "--trace", str(tmp_path / "trace.json")], capture_output=True, text=True, check=True
    )
    assert "2 partitions (2-2), 3 micro-batches, batch 6" in done.stdout
    assert (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("samples", ["", ",3"])
def test_measured_layers_take_what_arithmetic_says(command_line, tmp_path, samples):
    times, trace = tmp_path / "times.csv", tmp_path / "trace.json"
    times.write_text(f"forward_ms,backward_ms{',samples' * bool(samples)}\n" + f"10,20{samples}\n" * 4)
    words = ("--schedule", "1f1b", "--devices", 4, "--checkpoint", "never", "--trace", trace)
    size = () if samples else ("--batch-size", 8)
    assert command_line("simulate", "--layers", times, *words, *size)[0] == 0
    out = command_line("explain", trace, "--against", "1f1b")[1]
    assert out.startswith("330.")
    assert " against 330.000 ms, " in out
    assert "no action is more than" in out
