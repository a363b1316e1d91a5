"""Examples run and learn; the migrated ones differ from the old programs by two imports, and give the same losses."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache

import pytest
import torch

from gpipe_bench.models.table import MODELS, model_spec, parse_arguments
from tests.project.pages import blocks
from tests.project.tree import ROOT

EXAMPLES = ROOT / "examples"
GUIDE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
# Program -> package that it was written for.
MIGRATED = {"language_model": "torch.distributed.pipeline", "unet": "torchgpipe", "resnet": "fairscale"}

pytestmark = pytest.mark.timeout(300)


def run(path, *arguments):
    """What a program prints."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            torch.set_num_threads(threads)
    return printed.getvalue()


@cache
def losses_of_migrated(name):
    """The losses of steps 0, 10 and 20."""
    return losses(run(EXAMPLES / "migrated" / f"{name}.py", "--steps", 21))


@pytest.mark.parametrize(
    "example",
    [
        example
        for page in ("skips", "from_stages")
        for example in blocks((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), "python")
    ],
)
def test_the_examples_of_models_train(example):
    names = {}
    exec(example, names)
    assert all(parameter.grad is not None for parameter in names["pipe"].parameters())


def losses(text):
    return [float(value) for value in re.findall(r"loss ([0-9.]+)", text)]


def test_every_example_is_tested():
    tested = {"distributed", "my_model", "resnet_on_digits", "transformer_blocks", "unet_on_digits"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested
    assert {path.stem for path in (EXAMPLES / "migrated").glob("*.py")} == set(MIGRATED)


def test_transformer_blocks_are_a_model_of_the_commands():
    name = f"{EXAMPLES / 'transformer_blocks.py'}:blocks"
    arguments = parse_arguments(name, "count=2;width=16;heads=2;tokens=4")
    spec = model_spec(name)
    inputs, target = spec.make_batch(3, arguments)
    output = spec.build(**arguments)(inputs)
    assert output.shape == inputs.shape == (3, 4, 16)
    assert spec.loss(output, target).shape == ()


def test_processes_share_a_pipeline():
    options = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    program = [sys.executable, *options, EXAMPLES / "distributed.py"]
    assert len(losses(subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True).stdout)) == 1


def test_a_resnet_learns_digits_and_its_weights_go_back():
    options = ("--network", "timm/test_resnet", "--epochs", 2, "--images", 768, "--batch-size", 32)
    out = run(EXAMPLES / "resnet_on_digits.py", *options)
    assert losses(out)[-1] < 1.5
    accuracies = [float(value) for value in re.findall(r"accuracy ([0-9.]+)", out)]
    assert len(accuracies) == 2
    assert accuracies[0] == accuracies[1] > 0.6


def test_a_model_of_ones_own_is_a_model_of_the_suite():
    spec = MODELS["examples/my_model.py:mlp"]
    assert spec.layers(spec.check({"depth": 3})) == 4
    assert spec.loss(torch.zeros(2, 10), torch.zeros(2, dtype=torch.int64)) > 0


def test_a_unet_learns_as_the_plain_model_does():
    out = run(EXAMPLES / "unet_on_digits.py", "--steps", 21)
    pairs = re.findall(r"loss ([0-9.]+), of the plain model ([0-9.]+)", out)
    assert len(pairs) == 3
    assert all(one == other for one, other in pairs)
    assert float(pairs[-1][0]) < 0.8 * float(pairs[0][0])


@pytest.mark.parametrize("name", MIGRATED)
def test_migrated_programs_learn(name):
    found = losses_of_migrated(name)
    assert len(found) == 3
    assert found[-1] < 0.9 * found[0]


def changes(name):
    """The two old lines and the two new ones, as the guide shows them beside the program."""
    section = GUIDE.split(f"examples/migrated/{name}.py")[1]
    block = re.search(r"```diff\n(.*?)```", section, re.DOTALL).group(1).splitlines()
    return [line[1:] for line in block if line[0] == "-"], [line[1:] for line in block if line[0] == "+"]


@pytest.mark.parametrize("name", MIGRATED)
def test_the_guide_shows_the_two_lines_that_changed(name):
    old, new = changes(name)
    lines = (EXAMPLES / "migrated" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(old) == len(new) == 2
    assert [line for line in lines if "gpipe_bench" in line] == new
    assert all(MIGRATED[name].partition(".")[0] in line for line in old)


def is_installed(package):
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("name", MIGRATED)
def test_losses_are_those_of_the_old_program(tmp_path, name):
    if not is_installed(MIGRATED[name]):
        pytest.skip(f"{MIGRATED[name]} is not installed here")
    text = (EXAMPLES / "migrated" / f"{name}.py").read_text(encoding="utf-8")
    for old, new in zip(*changes(name), strict=True):
        text = text.replace(new, old)
    if name == "language_model":
        start = 'torch.distributed.rpc.init_rpc("worker", rank=0, world_size=1)\n    data, tokens'
        text = text.replace("import torch\n", "import torch\nimport torch.distributed.rpc\n", 1)
        text = text.replace("data, tokens", start, 1)
    before = tmp_path / f"{name}.py"
    before.write_text(text)
    env = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    command = [sys.executable, "-W", "ignore", before, "--steps", "11"]
    old = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert losses(old) == losses_of_migrated(name)[:2]


def test_the_examples_of_the_guide_run():
    older, original = ({} for _ in range(2))
    for example, names in zip(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL), (older, original), strict=True):
        exec(compile(example, "migration.md", "exec"), names)
    assert older["pipe"][0].bias.tolist() == [1.0] * 4
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(original["pipe"].eval()(images).local_value(), original["network"].eval()(images))


def test_names_of_the_guide_exist():
    import gpipe_bench
    import gpipe_bench.balance
    import gpipe_bench.skip

    rows = re.findall(r"^\| `(?:torch|fairscale)[^|]*\| ([^|]+) \|$", GUIDE, re.MULTILINE)
    assert len(rows) > 5
    old = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`(?:torch|fairscale)[^|]*)\|", GUIDE, re.MULTILINE))))
    here = {name for module in (gpipe_bench, gpipe_bench.skip, gpipe_bench.balance) for name in dir(module)}
    assert {name for name in old if name[0].isalpha() and name not in ("torchgpipe", "RRef")} <= here
