"""`balance`: costs of both splits, and the balance alone in the last line."""

from __future__ import annotations

import pytest

from gpipe_bench.cli import main
from gpipe_bench.models.measured import read_layers
from tests.project.tree import ROOT

UNET = ("--model-args", "depth=2;B=1;C=4;size=16", "--batch-size", "8")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(["balance", *arguments])
    found = capsys.readouterr()
    return caught.value.code, found.out, found.err


@pytest.mark.parametrize("by", ["simulation", "size", "time"])
def test_the_last_line_is_the_balance(capsys, by):
    status, out, _ = call(capsys, *UNET, "--partitions", "3", "--by", by, "--timeout", "0")
    assert not status
    sizes = [int(size) for size in out.splitlines()[-1].split("-")]
    assert len(sizes) == 3
    assert sum(sizes) == 29
    assert "times as much with the even split" in out
    ratio = float(out.split(", ")[-1].split(" times")[0])
    assert ratio >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--partitions", "3", "--by", "tim"), "--by must be one of time, size, simulation, got 'tim'; use 'time'"),
        (("--partitions", "3", "--model", "unett"), ", got 'unett'; use 'unet'"),
        (("--partitions", "3", "--model", "timm/nope"), "error: --model must be one that timm has, got 'timm/nope'"),
        (("--partitions", "30"), "--partitions must be at most the 29 layers of unet, got 30; lower it"),
        (("--partitions", "2", "--checkpoint", "x"), "checkpoint must be one of always, except_last, never, got 'x'"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    status, out, err = call(capsys, *UNET, *arguments)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_micro_batches_are_those_that_the_batch_gives(capsys):
    status, out, err = call(capsys, *UNET, "--partitions", "2", "--by", "size", "--chunks", "1000")
    assert not status
    assert "; batch 8 in 8 micro-batches\n" in out
    assert err == "note: chunks: 1000 asked for, 8 used, since the batch has 8 samples\n"


def test_a_layer_that_holds_most_of_the_weights_is_named(capsys):
    arguments = ("--model", "torchvision/alexnet", "--model-args", "size=64", "--partitions", "2", "--by", "size")
    status, _, err = call(capsys, *arguments)
    assert not status
    layer = "one of the 8 layers, classifier_1, holds 62 % of the weights"
    assert err == f"note: torchvision/alexnet: {layer}; no balance can divide it\n"


MLP = ("--model", "examples/my_model.py:mlp", "--model-args", "width=8;depth=3", "--batch-size", "12", "--chunks", "3")


def test_measured_layers_can_be_simulated(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    file = tmp_path / "times.csv"
    status, out, _ = call(
        capsys, *MLP, "--by", "time", "--timeout", "0", "--partitions", "2", "--layers-out", str(file)
    )  # fmt: skip
    assert not status
    layers = read_layers(file)
    assert [layer.samples for layer in layers] == [4] * 4
    balance = out.splitlines()[-1]
    with pytest.raises(SystemExit) as caught:
        main(["simulate", "--layers", str(file), "--balance", balance, "--chunks", "3", "--schedule", "zb_h1"])
    assert not caught.value.code
    assert f"2 partitions ({balance}), 3 micro-batches, batch 12;" in capsys.readouterr().out


@pytest.mark.parametrize(("by", "file"), [("size", "x.csv"), ("simulation", "x.csv"), ("time", "x.txt")])
def test_layers_are_written_where_they_are_timed(capsys, tmp_path, by, file):
    status, _, err = call(capsys, *UNET, "--partitions", "2", "--by", by, "--layers-out", str(tmp_path / file))
    assert status == 2
    assert "--layers-out must name a CSV file, and go with --by time, got " in err


def test_a_network_with_skips_has_no_file_of_layers(capsys, tmp_path):
    given = ("--partitions", "2", "--by", "time", "--timeout", "0", "--layers-out", str(tmp_path / "x.csv"))
    status, _, err = call(capsys, *UNET, *given)
    assert status
    assert "module must have layers without skips to be measured one by one" in err
    assert err.count("\n") == 1
    assert list(tmp_path.glob("*.csv")) == []
