"""``simulate``: its table, its files, its errors."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace

import pytest

from gpipe_bench.cli import main
from gpipe_bench.cli.cells import row_words
from gpipe_bench.machine.profile import PROFILES
from gpipe_bench.results.rows import Row
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from gpipe_bench.settings import BACKWARDS, FLAVOURS
from gpipe_bench.suite.published.known_errors import error_words
from tests.project.tree import ROOT

SMALL = ("--model-args", "depth=2;B=1;C=8;size=32", "--balance", "10-10-9", "--batch-size", 8, "--chunks", 4)
PUBLISHED = ("--model-args", "depth=5;B=5;C=64", "--balance", "34-76-70-61", "--flavour", "published")


@pytest.fixture(autouse=True)
def _traces(tmp_path_factory, monkeypatch):
    """Stored traces of these tests only, shared by all of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def call(capsys):
    """Run the command; gives exit status, what it printed, and its errors."""

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["simulate", *map(str, arguments)])
        printed = capsys.readouterr()
        return caught.value.code or 0, printed.out, printed.err

    return run


def test_a_table_of_devices_and_totals(call):
    status, out, err = call(*SMALL)
    assert (status, err) == (0, "")
    assert "simulated on 3 x cuda Tesla P40 (p40)" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("cuda:")] == [
        ["cuda:0", "10"],
        ["cuda:1", "10"],
        ["cuda:2", "9"],
    ]
    assert "samples/s simulated on 3 devices," in out
    assert f"\n{error_words('p40')}\n" in out
    assert "published" not in out


def test_a_profile_of_ones_own_has_no_known_error(call, tmp_path):
    profile = tmp_path / "h100.yaml"
    profile.write_text((ROOT / "gpipe_bench/machine/profiles/h100.yaml").read_text())
    assert f"\nerror on {profile}: samples/s and GiB never compared with a run" in call(*SMALL, "--profile", profile)[1]


def test_the_table_fits_a_terminal(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = call(*SMALL)
    assert max(map(len, out.splitlines())) <= 80
    assert "imbal." in out


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_schedule_that_is_asked_for_orders_the_backward_pass(call, schedule):
    status, out, _ = call(*SMALL, "--schedule", schedule, "--flavour", "published")
    assert status == 0
    assert f", schedule {schedule}, autograd published" in out
    assert call(*SMALL, "--flavour", "published")[1] != out


def test_published_values_stand_beside_the_simulated_ones(call):
    status, out, _ = call(*PUBLISHED)
    assert status == 0
    (line,) = [line.split() for line in out.splitlines() if line.startswith("ablation: throughput")]
    theirs, ours, error = float(line[-3]), float(line[-2]), float(line[-1].rstrip("%"))
    assert theirs == 58.48
    assert error == pytest.approx(100 * (ours / theirs - 1), abs=0.1)
    assert any(line.startswith("ablation: memory") for line in out.splitlines())


def test_other_settings_have_no_published_value(call):
    assert "ablation:" not in call(*PUBLISHED, "--chunks", 4)[1]


def test_without_a_balance_all_is_on_one_device(call):
    _, out, _ = call("--model-args", "depth=2;B=1;C=8;size=32", "--batch-size", 8)
    assert "1 partition (29)" in out


ARGS = ("--model-args", "depth=2;B=1;C=8;size=32", "--batch-size", 8)


@pytest.mark.parametrize("schedule", TWO_PER_DEVICE)
def test_the_number_of_devices_stands_beside_the_throughput(call, schedule):
    status, out, _ = call(*ARGS, "--chunks", 4, "--balance", "7-7-7-8", "--schedule", schedule)
    assert status == 0
    assert re.search(r"4 partitions .*\bon 2 x .*samples/s simulated on 2 devices", out, re.DOTALL)
    status, _, error = call(*ARGS, "--balance", "14-15", "--schedule", schedule, "--devices", 2)
    assert status == 2
    assert "devices must be at most 1 for 2 partitions, got 2" in error


@pytest.mark.parametrize(("schedule", "partitions"), [((), 3), (("--schedule", "zb_v"), 6)])
def test_for_partitions_a_balance_is_found(call, schedule, partitions):
    status, out, _ = call(*ARGS, "--partitions", partitions, *schedule)
    assert status == 0
    assert "simulated on 3 x cuda Tesla P40 (p40)" in out
    (sizes,) = re.findall(rf"{partitions} partitions \(([0-9-]+)\)", out)
    assert sum(map(int, sizes.split("-"))) == 29
    assert call(*ARGS, "--balance", sizes, *schedule)[1] == out


@pytest.mark.parametrize(("schedule", "partitions"), [((), 3), (("--schedule", "zb_v"), 6)])
def test_devices_give_the_partitions_that_a_schedule_has_on_them(call, schedule, partitions):
    assert call(*ARGS, "--devices", 3, *schedule) == call(*ARGS, "--partitions", partitions, *schedule)


@pytest.mark.parametrize("words", [("--partitions", 2), ("--balance", "14-15")])
def test_more_devices_than_partitions_are_refused(call, words):
    status, _, err = call(*ARGS, "--devices", 3, *words)
    assert status == 2
    assert err.startswith("error: --devices must be at most 2 for 2 partitions, got 3; lower it")


def test_partitions_share_devices_that_are_fewer(call):
    status, out, _ = call(*ARGS, "--balance", "14-15", "--devices", 1, "--transfer", "host", "--no-tf32")
    assert status == 0
    assert "host transfer, autograd current, no TF32\nsimulated on 1 x cuda Tesla P40 (p40)" in out
    assert re.findall(r"cuda:(\d) +(\d+)", out) == [("0", "29")]


def test_a_balance_for_other_partitions_is_refused(call):
    status, _, err = call(*ARGS, "--partitions", 3, "--balance", "14-15")
    assert (status, err.count("\n")) == (2, 1)
    assert "--balance must have one entry per partition, 3, got 2 in 14-15" in err


def test_out_of_memory_is_a_result(call, tmp_path):
    rows = tmp_path / "rows.csv"
    status, out, _ = call("--model-args", "depth=5;B=10;C=160", "--batch-size", 64, "--chunks", 1, "--rows", rows)
    assert status == 0
    assert "oom: device 0 needs " in out
    with rows.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["status"], row["throughput_samples_per_s"]) == ("oom", "")
    assert row["reason"].startswith("device 0 needs ")


def test_rows_and_trace_are_written_with_their_evidence(call, tmp_path):
    rows, trace = tmp_path / "rows.csv", tmp_path / "trace.json"
    status, out, _ = call(*SMALL, "--variant", "dep-x-x", "--rows", rows, "--trace", trace)
    assert status == 0
    assert f"wrote {rows}" in out
    with rows.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert tuple(row) == Row.columns()
    assert (row["evidence"], row["variant"], row["profile"], row["flavour"]) == (
        "simulated",
        "dep-x-x",
        "p40",
        "current",
    )
    written = json.loads(trace.read_text())
    assert written["otherData"]["evidence"] == "simulated"
    assert sum(event["ph"] == "X" and event["cat"] == "forward" for event in written["traceEvents"]) == 12


def test_a_profile_of_ones_own(call, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text((PROFILES / "p40.yaml").read_text().replace("name: p40", "name: mine"))
    assert "(mine)" in call(*SMALL, "--profile", path)[1]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("name: x\n  bad: [\n", ["must be YAML, got an error in "]),
        ("[1, 2]\n", [" must be a mapping of settings, got list"]),
        ((PROFILES / "p40.yaml").read_text().replace("queue_depth", "queue").replace("device", "divice"), [
            ": device must be given", ": queue_depth must be given", ": queue must be", ": divice must be"]),
    ],
)  # fmt: skip
def test_every_problem_of_a_profile_is_a_line(call, tmp_path, text, problems):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    status, out, err = call(*SMALL, "--profile", path)
    assert (status, out) == (2, "")
    lines = sorted(err.splitlines())
    assert len(lines) == len(problems)
    assert all(line.startswith("error: --profile ") for line in lines)
    assert all(any(problem in line for line in lines) for problem in problems)


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (("--model", "unett"), ["--model must be one of"]),
        (("--model-args", "depth=x"), ["--model-args: depth of unet must be"]),
        (("--profile", "p41"), ["--profile must be one of"]),
        (
            ("--profile", "none.yaml"),
            ["--profile must be one of a100, h100, h200, p100, p40, v100 or a YAML"],
        ),
        (("--variant", "x", "--chunks", "0"), ["--chunks must be", "--variant must be"]),
        (("--balance", "1-2"), ["--balance must sum to the 241 layers"]),
        (("--flavour", "new"), ["--flavour must be one of current, published"]),
        (("--trace", "/proc/nowhere/trace.json"), ["output must be writable"]),
        (
            ("--cells", "none.json", "--trace", "a.json", "--rows", "a.csv", "--devices", 2),
            ["options that do nothing with --cells must be left out, got --trace, --rows, --devices; leave them out"],
        ),
        (
            ("--only", "a", "--timelines", "b", "--processes", 2),
            ["options that do nothing without --cells must be left out, got --only, --timelines, --processes"],
        ),
    ],
    ids=lambda value: str(value[0]),
)
def test_bad_input_is_a_line_per_problem(call, arguments, problems):
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    lines = err.splitlines()
    assert len(lines) == len(problems)
    assert all(line.startswith(f"error: {problem}") for line, problem in zip(lines, problems, strict=True))


def test_without_a_step_there_is_no_trace(call, tmp_path):
    for name in ("step.json", "step.jsonl"):
        status, out, err = call(*SMALL, "--batch-size", 10**6, "--trace", tmp_path / name)
        assert (status, "oom: device" in out, f"{name} is not written, as there is no step: device" in err) == (
            0,
            True,
            True,
        )
    assert not [*tmp_path.iterdir()]


def test_lines_of_cells_tell_apart_who_runs_the_model():
    row = Row(evidence="simulated", partitions=2, chunks=4, variant="dep-x-x", throughput_samples_per_s=1.0)
    rows = [replace(row, backward=kind, flavour=flavour) for kind in BACKWARDS for flavour in FLAVOURS]
    assert len({row_words(row) for row in rows}) == len(rows)


TIMES = "forward_ms,backward_ms,samples\n" + "10,20,4\n" * 6


@pytest.fixture
def times(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text(TIMES)
    return path


def test_times_of_layers_in_place_of_a_model(call, times, tmp_path):
    rows = tmp_path / "rows.csv"
    given = ("--schedule", "zb_h1", "--partitions", 3, "--chunks", 2, "--profile", "h100", "--rows", rows)
    status, out, err = call("--layers", times, *given)
    assert (status, err) == (0, "")
    assert out.startswith(f"{times}\n3 partitions (2-2-2), 2 micro-batches, batch 8; ")
    assert "simulated on 3 x cuda H100" in out
    assert "copies take the latency of their link alone: the layers have no output_mib\n" in out
    assert "each W takes half of its backward pass: the layers have no backward_weights_ms\n" in out
    (row,) = csv.DictReader(rows.read_text().splitlines())
    assert (row["evidence"], row["model"], row["batch_size"]) == ("simulated", str(times), "8")
    assert call("--model", times, "--batch-size", 8, *given)[1] == out


def test_other_times_are_another_configuration(call, times, tmp_path):
    digests = []
    for forward in ("10", "11"):
        times.write_text(TIMES.replace("10", forward, 1))
        call("--layers", times, "--partitions", 2, "--rows", tmp_path / "rows.csv")
        (row,) = csv.DictReader((tmp_path / "rows.csv").read_text().splitlines())
        digests.append((row["config_sha256"], row["cell"]))
    assert len({*digests}) == 2


def test_the_balance_is_that_of_the_times(call, times):
    times.write_text("forward_ms,backward_ms,samples\n" + "1,2,4\n" * 5 + "5,10,4\n")
    assert "2 partitions (5-1), 8 micro-batches, batch 32;" in call("--layers", times, "--partitions", 2)[1]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (TIMES, ("--model", "vit"), "--layers must be the only model, got "),
        (TIMES, ("--batch-size", 128), "batch_size must give micro-batches of 4 samples, as the times of the layers"),
        (
            TIMES.replace(",samples", "").replace(",4", ""),
            (),
            "--batch-size must be given where --layers has no column",
        ),
        (TIMES, ("--partitions", 7), "--partitions must be at most the 6 layers of "),
        (TIMES, ("--balance", "3-2"), "--balance must sum to the 6 layers of "),
        ("forward_ms\n1\n", (), "layers must have a column backward_ms, got forward_ms; add it to the header"),
        (TIMES + "1,-2,4\n", (), "backward_ms of layer 6 must be a number from 0 to 86400000, got -2.0; correct it"),
    ],
)
def test_bad_times_are_one_line(call, times, text, options, message):
    times.write_text(text)
    status, out, err = call("--layers", times, *options)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_file_of_layers_is_a_csv_file_that_is_there(call, tmp_path):
    assert "--layers must be a file whose name ends in .csv" in call("--layers", tmp_path / "times.txt")[2]
    assert "layers must be a file that can be read" in call("--layers", tmp_path / "times.csv")[2]
