"""``schedule``: what is printed of a schedule by name and of a file, and the errors."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest

from gpipe_bench.cli import main
from gpipe_bench.emulator.build import obstacle
from gpipe_bench.schedules import SCHEDULES, Durations, drawn, named_schedule, read_csv, timing, to_csv
from gpipe_bench.schedules.table import partition_count

REASON = obstacle()


@pytest.fixture
def call(capsys):
    """Run the command; gives exit status, what it printed, and its errors."""

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["schedule", *map(str, arguments)])
        printed = capsys.readouterr()
        return caught.value.code or 0, printed.out, printed.err

    return run


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


def test_a_file_is_read_as_it_was_written(call, tmp_path):
    file = tmp_path / "own.csv"
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
        (["simulate", "gpipe", "--profile", "nope"], "profile must be one of a100"),
        (["run", "gpipe", "--profile", "nope"], "profile must be one of a100"),
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


SMALL = ("--model", "gpt2", "--model-args", "L=1;D=8;heads=2;vocabulary=8;context=4;dropout=0", "--devices", 2)


@pytest.mark.parametrize("command", ["simulate", "run"])
def test_each_action_of_a_step_stands_beside_its_prediction(call, tmp_path, command):
    file, out = tmp_path / "own.csv", tmp_path / "actions"
    file.write_text(to_csv(named_schedule("1f1b", 3, 2, 2)))
    status, text, error = call(command, file, *SMALL, "--balance", "2-2", "--out", out)
    assert (status, error) == (0, "")
    assert text.startswith({"simulate": "simulated: ", "run": "measured: "}[command])
    assert {path.suffix for path in tmp_path.glob("actions.*")} == {".csv", ".svg", ".pdf", ".png"}
    with (tmp_path / "actions.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 3 * 2 * 2
    for row in rows:
        assert float(row["late_ms"]) == pytest.approx(
            float(row["start_ms"]) - float(row["predicted_start_ms"]), abs=1e-5
        )


def test_the_table_of_actions_is_not_written_over_the_schedule(call, tmp_path):
    file = tmp_path / "own.csv"
    file.write_text(to_csv(named_schedule("1f1b", 3, 2, 2)))
    status, _, error = call("simulate", file, *SMALL, "--out", tmp_path / "own")
    assert (status, "must not be the schedule's own file" in error) == (2, True)


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_an_emulated_step_stands_beside_its_simulation():
    command = [
        sys.executable,
        "-m",
        "gpipe_bench",
        "schedule",
        "emulate",
        "zb_v",
        *map(str, SMALL),
        "--microbatches",
        "2",
    ]
    done = subprocess.run([*command, "--balance", "1-1-1-1"], capture_output=True, text=True, check=True)
    assert "predicted simulated on h100" in done.stdout


@pytest.mark.parametrize("samples", ["", ",3"])
def test_measured_layers_take_what_arithmetic_says(call, tmp_path, samples):
    times = tmp_path / "times.csv"
    times.write_text(f"forward_ms,backward_ms{',samples' * bool(samples)}\n" + f"10,20{samples}\n" * 4)
    status, out, err = call("simulate", "1f1b", "--devices", 4, "--microbatches", 8, "--model", times)
    assert (status, err) == (0, "")
    assert out.startswith("simulated: 330.")
    assert "free transfers, and the median of each pass and partition: 330.00 ms" in out
    assert "no action is more than" in out
