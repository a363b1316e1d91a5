"""A model of one's own wherever the command line takes a model: it is measured, simulated, balanced and advised on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_bench.balance import balance_by_simulation
from gpipe_bench.cli import main
from gpipe_bench.simulator import Model, simulate
from gpipe_bench.suite.cells import CELL_PATTERN, MeasuredCell
from gpipe_bench.suite.simulated_cells import SimulatedCell
from tests.project.tree import ROOT
from tests.suite.cells_of import in_file

NET = """
import torch
from torch import nn

def net(width=64, depth=3):
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 2))

def net_batch(batch_size, width=64):
    return torch.rand(batch_size, width)
"""
NAME = "nets/net.py:net"
SHARED = ("--batch-size", "8", "--chunks", "2")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "net.py").write_text(NET)
    return tmp_path


@pytest.fixture
def call(capsys):
    """Runs a command in this process; gives exit status, stdout and stderr."""

    def called(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(list(map(str, arguments)))
        printed = capsys.readouterr()
        return caught.value.code or 0, printed.out, printed.err

    return called


def edited(folder):
    (folder / "nets" / "net.py").write_text(NET.replace("nn.Linear(width, 2)", "nn.Linear(width, 200_000)"))


def throughput(text):
    return float(re.search(r"^([0-9.]+) samples/s simulated", text, re.MULTILINE)[1])


def test_it_is_measured_in_fresh_processes(call):
    given = ("--model", f"./{NAME}", "--model-args", "width=8", "--partitions", 2, *SHARED, "--steps", 1)
    status, out, err = call("run", "--out", "raw.json", *given, "--repeats", 2)
    assert (status, out.count("ok: ")) == (0, 2)
    assert err == f"note: {NAME} has no function net_loss; the loss is the mean of the squared output\n"
    rows = [result["row"] for result in json.loads(Path("raw.json").read_text())]
    assert {(row["model"], row["model_args"], row["status"]) for row in rows} == {(NAME, "width=8;depth=3", "ok")}
    assert all(row["throughput_samples_per_s"] > 0 for row in rows)


def test_a_module_of_the_current_folder_is_found_by_the_installed_command(folder):
    """Its path begins with the folder of the command, not with the current one; a repeat is a process of its own."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from gpipe_bench.cli import main; main()"
    given = ("--model", "nets.net:net", "--model-args", "width=8", "--partitions", "2", *SHARED, "--steps", "1")
    command = [sys.executable, "-P", "-c", program, "run", "--out", "raw.json", *given, "--repeats", "1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((folder / "raw.json").read_text())
    assert (result["row"]["model"], result["row"]["status"]) == ("nets.net:net", "ok")


def test_it_is_simulated_and_an_edit_is_simulated_anew(call, folder):
    arguments = ("simulate", "--model", NAME, *SHARED, "--balance", "2-2", "--profile", "v100")
    status, before, _ = call(*arguments)
    assert status == 0
    assert before.startswith(f"{NAME} (width=64;depth=3)\n")
    assert call(*arguments)[1] == before
    edited(folder)
    after = call(*arguments)[1]
    assert throughput(after) < throughput(before)


def test_many_cells_are_simulated_in_several_processes(call):
    shared = {"model": NAME, "batch_size": 8, "checkpoint": "always", "balance": "auto"}
    cells = [SimulatedCell(**shared, partitions=n, chunks=m) for n in (1, 2) for m in (1, 2, 4)]
    status, _, _ = call("simulate", *in_file(Path(), *cells), "--out", "raw.json", "--processes", 2)
    assert status == 0
    rows = [result["row"] for result in json.loads(Path("raw.json").read_text())]
    assert {(row["model"], row["status"]) for row in rows} == {(NAME, "ok")}
    assert len(rows) == 6


@pytest.mark.parametrize("way", ["simulation", "size", "time"])
def test_it_is_balanced(call, way):
    options = ("--timeout", 0.2) if way == "time" else ()
    status, out, _ = call("balance", "--model", NAME, "--partitions", 2, "--by", way, *SHARED, *options)
    assert status == 0
    assert sum(map(int, out.splitlines()[-1].split("-"))) == 4


def test_advice_is_given(call):
    given = ("--model-args", "width=512", "--devices", 2, "--batch-size", 8, "--profile", "a100", "--rows", "rows.csv")
    status, out, _ = call("advise", "--model", NAME, *given)
    assert status == 0
    assert f"{NAME} (width=512;depth=3), batch 8; simulated on up to 2 x a100" in " ".join(out.split())
    assert NAME in Path("rows.csv").read_text()


def test_the_interface_takes_its_name():
    model = Model(NAME, {"width": 32})
    balance = balance_by_simulation(2, model, batch_size=8)
    step = simulate(model, balance=balance, batch_size=8, profile="h100")
    row = step.row()
    assert (row.model, row.model_args, row.status) == (NAME, "width=32;depth=3", "ok")


def test_traces_are_kept_and_those_of_other_code_are_not_taken(folder):
    # A host that is slower than the device would hide what has changed.
    options = {"balance": [4], "batch_size": 8, "profile": "v100", "cache": folder / "traces"}
    first = simulate(Model(NAME, {}), **options).step_time_ms
    kept = set((folder / "traces").iterdir())
    assert simulate(Model(NAME, {}), **options).step_time_ms == first
    assert set((folder / "traces").iterdir()) == kept
    edited(folder)
    assert simulate(Model(NAME, {}), **options).step_time_ms > first
    assert set((folder / "traces").iterdir()) > kept


@pytest.mark.parametrize("kind", [MeasuredCell, SimulatedCell])
def test_a_cell_has_a_name_that_a_file_can_have_and_another_after_an_edit(folder, kind):
    settings = {"model": f"{folder}/{NAME}", "model_args": "width=8", "partitions": 2, "balance": (2, 2)}
    before, (other, again) = kind(**settings), (kind(**settings), kind(**{**settings, "model": NAME}))
    assert before.id == other.id == again.id
    assert before.model == NAME
    assert re.fullmatch(CELL_PATTERN, before.id)
    assert "nets-net-py-net" in before.id
    edited(folder)
    after = kind(**settings)
    assert after.id != before.id
    assert after.configuration != before.configuration


def test_a_long_path_makes_no_long_name(folder):
    place = folder / ("long" * 20) / ("longer" * 20)
    place.mkdir(parents=True)
    (place / "net.py").write_text(NET)
    cell = MeasuredCell(model=f"{place}/net.py:net", model_args="", partitions=2, balance=(2, 2))
    assert len(cell.id) < 120
    assert re.fullmatch(CELL_PATTERN, cell.id)


COMMANDS = {
    "run": ("run", "--out", "a.json", "--partitions", "2"),
    "simulate": ("simulate",),
    "balance": ("balance", "--partitions", "2"),
    "advise": ("advise", "--devices", "2"),
}
MISTAKES = {
    "nets/nett.py:net": "model must be in a file that exists, got 'nets/nett.py:net'; correct the path, which",
    "nets/net.py:nte": "model must name a function of nets/net.py, got 'nte'; use 'net'",
    "nets/net.py": "got 'nets/net.py'; name a function in it, 'nets/net.py:<function>'",
    "bad.py:net": "got ZeroDivisionError: division by zero (bad.py, line 2); correct the function",
    "bad.py:alone": "must come with a function alone_batch(batch_size) in bad.py, which makes its inputs",
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_is_one_line_of_every_command(call, folder, command, mistake):
    (folder / "bad.py").write_text(
        "from torch import nn\ndef net(): 1 / 0\ndef alone(): return nn.Sequential(nn.ReLU(), nn.ReLU())\n"
    )
    status, _, err = call(*COMMANDS[command], "--model", mistake)
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert status == 2
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert MISTAKES[mistake] in lines[0]
    assert not (folder / "a.json").exists()


@pytest.mark.parametrize("command", ["run", "simulate", "balance", "balance --by size", "balance --by time"])
def test_layers_that_do_not_fit_are_one_line(call, folder, command):
    (folder / "bad.py").write_text(NET.replace("nn.Linear(width, 2)", "nn.Linear(width + 1, 2)"))
    name, *options = command.split()
    status, _, err = call(*COMMANDS[name], *options, "--model", "bad.py:net")
    (line,) = (line for line in err.splitlines() if not line.startswith("note: "))
    assert status == 2
    assert line.startswith("error: ")
    assert "RuntimeError: " in line


def test_a_loss_that_fails_is_one_line_or_a_row(call, folder):
    (folder / "bad.py").write_text(NET + "\ndef net_loss(output, target): return output.nothing()\n")
    status, _, err = call("simulate", "--model", "bad.py:net")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("error: loss must ")
    given = ("--partitions", 2, *SHARED, "--model-args", "width=4", "--repeats", 1)
    assert call("run", "--out", "raw.json", "--model", "bad.py:net", *given)[0] == 1
    (result,) = json.loads(Path("raw.json").read_text())
    assert (result["row"]["status"], "nothing" in result["row"]["reason"]) == ("error", True)


def test_a_loss_that_fails_names_its_line_in_place_of_a_traceback(call, folder):
    text = NET + "\ndef net_loss(output, target): return output.nothing()\n"
    (folder / "bad.py").write_text(text)
    given = ("--partitions", 2, *SHARED, "--model-args", "width=4")
    status, _, err = call("run", "--out", "raw.json", "--model", "bad.py:net", *given)
    assert (status, err.count("\n")) == (1, 1)
    assert err.endswith(f"(bad.py, line {text.count(chr(10))})\n")


@pytest.mark.parametrize(
    ("loss", "got"), [("output", "a tensor of shape [8, 2]"), ("output.sum().item()", ""), ("'zero'", "'zero'")]
)
def test_a_loss_that_is_no_number_in_a_tensor_is_one_line(call, folder, loss, got):
    (folder / "bad.py").write_text(f"{NET}\ndef net_loss(output, target): return {loss}\n")
    given = ("--partitions", 2, *SHARED, "--model-args", "width=4")
    status, _, err = call("run", "--out", "raw.json", "--model", "bad.py:net", *given)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: loss must give one number in a tensor, got {got}")


def test_layers_that_need_values_run_on_one_partition_without_a_balance(call, folder):
    layer = "class Sign(nn.Module):\n    def forward(self, x):\n        return x if x.sum().item() > 0 else -x\n"
    text = NET.replace("nn.Linear(width, 2)", "nn.Linear(width, 2), Sign()") + layer
    (folder / "net.py").write_text(text)
    status, out, _ = call("run", "--out", "raw.json", "--model", "net.py:net", *SHARED, "--partitions", 1)
    assert (status, out.startswith("ok: ")) == (0, True)


def test_wrong_arguments_are_one_line(call):
    status, _, err = call("run", "--out", "a.json", "--model", NAME, "--model-args", "dpth=3", "--partitions", 2)
    assert (status, err) == (
        2, f"error: --model-args: argument of {NAME} must be one it declares, got 'dpth'; use 'depth'\n",
    )  # fmt: skip


def test_help_imports_no_module_of_the_users(call, folder):
    (folder / "nets" / "net.py").write_text("raise AssertionError")
    assert call("run", "--model", NAME, "--help")[0] == 0
