"""Bad input: one clear line on stderr, exit status 2, no file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gpipe_bench.cli import main
from tests.project.tree import ROOT
from tests.suite.cells_of import ok_result

RACES = next((ROOT / "results" / "reference").glob("measured/*/peers.csv"))
RUN = ("run", "--out", "{out}/a.json", "--model-args", "depth=2;B=1;C=4;size=16", "--partitions", "2")


def words(template, folder):
    return [word.format(out=folder, races=RACES) for word in template]


def called(arguments, capsys):
    """Exit status, stdout and stderr of a command in this process."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    printed = capsys.readouterr()
    return caught.value.code or 0, printed.out, printed.err


GIVEN = ["file", "times.csv"]
"""Files that the folder of a case has."""


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


BAD = {
    "unknown model": (
        (*RUN, "--model", "unett"),
        "<file>.py:<function>, <module>:<function>, got 'unett'; use 'unet'",
    ),
    "a network that cannot be cut": (
        ("run", "--out", "{out}/a.json", "--model", "timm/test_vit", "--model-args", "size=10"),
        "error: --model must be one that can be cut into layers, got timm/test_vit at size 10: Input height",
    ),
    "balance that does not sum": (
        (*RUN, "--balance", "14-14"),
        "--balance must sum to the 29 layers of unet, got 14-14, which sums to 28; change its entries",
    ),
    "chunks that are no number": ((*RUN, "--chunks", "many"), "'--chunks'"),
    "unwritable output": ((*RUN[:2], "{out}/file/a.json"), "output must be writable, got {out}/file"),
    "output that is a folder": ((*RUN[:2], "{out}"), "output must be a file, got the folder {out}; name a file in it"),
    "unknown option": ((*RUN, "--chunk", "3"), "No such option: --chunk"),
    "missing option": (("run",), "Missing option '--out'"),
    "unknown command": (("rnu",), "No such command 'rnu'"),
    "raw result that is none": (
        ("collect", "--experiment", "a", "--out", "{out}/a.csv", "{out}/file"),
        "raw result must be a file that run wrote, got {out}/file",
    ),
    "results to verify that are not named": (
        ("verify", "--out", "{out}/v.csv"),
        "error: results must be tables, --predictions or --claims, got none; name what to verify",
    ),
    "table that is absent": (("table", "--rows", "{out}/a.csv"), "table must be a readable CSV file, got {out}/a.csv"),
    "configuration that is absent": (("config", "check", "{out}/a.yaml"), "configuration must be a readable file"),
    "times of layers that are to run": (
        ("run", "--out", "{out}/a.json", "--model", "{out}/times.csv", "--balance", "1-1", "--batch-size", "8"),
        "error: model must have layers that run, got their times in {out}/times.csv; name the model, or use simulate",
    ),
    "sizes of layers of which times are known": (
        ("balance", "--partitions", "2", "--by", "size", "--model", "{out}/times.csv"),
        "error: model must have layers that run, got their times in {out}/times.csv; name the model, or use simulate",
    ),
    "advice on times of one size": (
        ("advise", "--model", "{out}/times.csv"),
        "error: --model must be a model that micro-batches of any size go through, got the times of one size; use sim",
    ),
    "a request that is no JSON": (("advise", "--request", "["), "--request must be a JSON object of settings, got '['"),
    "a request that is a list": (
        ("advise", "--request", "[]"),
        "--request must be a JSON object of settings, got '[]'",
    ),
    "judgement of an unknown schedule": (("judge", "gpipe_bench:1f1c"), "got '1f1c'; use '1f1b'"),
    "a table of other things": (
        ("table", "--rows", "{out}/times.csv"),
        "columns of {out}/times.csv must include experiment, evidence,",
    ),
    "profile of an unknown device": (
        ("profile", "--device", "cdua", "--out", "{out}/a.json"),
        "--device must be one of cpu, cuda, got 'cdua'; use 'cuda'",
    ),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "file").write_text("no raw result")
    (tmp_path / "times.csv").write_text("forward_ms,backward_ms\n1,2\n1,2\n")
    return tmp_path


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, folder, capsys):
    template, message = BAD[case]
    status, out, err = called(words(template, folder), capsys)
    assert status == 2
    assert out == ""
    assert message.format(out=folder) in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert files(folder) == GIVEN


def test_all_problems_of_a_cell_have_a_line(folder, capsys):
    status, _, err = called(words((*RUN, "--chunks", "0", "--steps", "0", "--model", "unett"), folder), capsys)
    assert status == 2
    assert [line.split(" must be")[0] for line in err.splitlines()] == [
        f"error: --{name}" for name in ("chunks", "steps", "model")
    ]


def test_all_problems_of_a_configuration_have_a_line(folder, capsys):
    blocks = "{wrong: {run: simulated, chunks: 0}, unknown: {run: measured, stps: 3}}"
    (folder / "a.yaml").write_text(f"devce: cpu\nexperiments: {{mine: {blocks}}}")
    status, out, err = called(["config", "check", str(folder / "a.yaml")], capsys)
    assert (status, out) == (2, "")
    rule = "must be a whole number of at least 1"
    assert err.splitlines() == [
        f"error: {folder}/a.yaml: devce must be a known key, got 'devce'; use 'device'",
        f"error: {folder}/a.yaml: experiments.mine.wrong.chunks {rule}, got 0; use 1 or more",
        f"error: {folder}/a.yaml: experiments.mine.unknown.stps must be a known key, got 'stps'; use 'steps'",
    ]


def test_an_experiment_with_two_results_of_one_run(folder, capsys):
    paths = [folder / "1.json", folder / "2.json"]
    for path in paths:
        path.write_text(ok_result().to_json())
    out = str(folder / "a.csv")
    status, _, err = called(["collect", "--experiment", "a", "--out", out, *map(str, paths)], capsys)
    assert status == 2
    assert "every run must be given once" in err
    assert files(folder) == ["1.json", "2.json", *GIVEN]


@pytest.mark.parametrize("table", ["devices", "steps", "events"])
@pytest.mark.parametrize("command", [("table",), ("figure", "ablation", "--out", "{out}/a")])
def test_a_companion_for_a_table_of_rows_is_refused_in_one_line(folder, capsys, table, command):
    rows = str(ROOT / f"results/reference/simulated/p40/ablation_{table}.csv")
    status, _, err = called([*words(command, folder), "--rows", rows], capsys)
    assert status == 2
    assert err.count("\n") == 1
    assert err.endswith(f"got those of a table of {table}; name another table\n")
    assert files(folder) == GIVEN


def test_a_group_without_a_command_shows_its_help(capsys):
    status, out, err = called(["schedule"], capsys)
    assert (status, err) == (2, "")
    assert "check" in out


@pytest.mark.parametrize("template", [BAD["balance that does not sum"][0], ("config", "check", "{out}/a.yaml"), ("x",)])
def test_a_process_ends_with_status_2(template, folder):
    command = [sys.executable, "-m", "gpipe_bench", *words(template, folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_too_few_devices_is_found_after_pytorch_was_asked_and_makes_a_row_without_numbers(folder):
    template = (*RUN, "--balance", "14-15", "--device", "cuda", "--devices", "2")
    command = [sys.executable, "-m", "gpipe_bench", *words(template, folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1
    assert "devices must be at most the 0 cuda devices that PyTorch sees here, got 2; " in done.stdout + done.stderr
    (out,) = folder.rglob("*.json")
    row = json.loads(out.read_text())["row"]
    assert (row["status"], row["throughput_samples_per_s"]) == ("skipped", None)
