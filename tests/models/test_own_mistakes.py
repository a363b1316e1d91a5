"""What is said of a mistake in a model of one's own: one line with what was got and what to change."""

from __future__ import annotations

import sys

import pytest

from gpipe_bench.errors import ConfigError
from gpipe_bench.models.table import model_spec
from tests.models.folders import write

pytestmark = pytest.mark.usefixtures("folder")
HEAD = "import torch\nfrom torch import nn\n"
BATCH = "def net_batch(batch_size): return torch.zeros(batch_size, 2)\n"

NAMES = {
    "nett.py:net": "be in a file that exists, got 'nett.py:net'; correct the path, which counts from the",
    "nett.x:net": "be in a module that exists, got 'nett.x:net'; correct its name, or start where Python finds it",
    "torch.nett:net": "be in a module that exists, got 'torch.nett:net'; correct its name, or start",
    "no name:net": "be in a module that exists, got 'no name:net'; ",
    "sys:exit": "be in a module that exists, got 'sys:exit'; ",
    ":net": "be in a module that exists, got ':net'; ",
    "net.py:nte": "name a function of net.py, got 'nte'; use 'net'",
    "net.py:": "name a function of net.py, got ''; use one of net, net_batch",
    "net.py:NUMBER": "got a value of type int in net.py:NUMBER; write 'def NUMBER(): return nn.Sequential(...)'",
    "net.py:MODEL": "got a value of type Sequential in net.py:MODEL; write 'def MODEL(): return nn.Sequential(...)'",
}
TEXTS = {
    "def net(:\n": "be in a file that can be imported, got SyntaxError: invalid syntax (net.py, line 1); correct",
    "\nimport no_such_thing\n": "got ModuleNotFoundError: No module named 'no_such_thing' (net.py, line 2)",
    "from . import parts\n": "got ImportError: attempted relative import with no known parent package (net.py, line 1)",
    "raise SystemExit('usage')": "be in a file that can be imported, got SystemExit: usage (net.py, line 1); correct",
    "def net(width): pass": "have defaults, got 'width' of net.py:net without; write 'width=<value>'",
    "def net(): pass": "come with a function net_batch(batch_size) in net.py, which makes its inputs, got none; add",
}
BODIES = {
    "return 1 / 0": "be made by net.py:net, got ZeroDivisionError: division by zero (net.py, line 4); correct the",
    "raise ValueError('a\\nb')": "be made by net.py:net, got ValueError: a b (net.py, line 4); correct the function",
    "return nn.ReLU()": "be an nn.Sequential with one layer or more, got a value of type ReLU from net.py:net; return",
    "return nn.Sequential()": "be an nn.Sequential with one layer or more, got an empty one from net.py:net; return",
    "return nn.Sequential(*[nn.ReLU()] * 2)": "be one that a pipeline takes, got net.py:net: children must be distinct",
}
BATCHES = {
    "return {}[3]": "have inputs that net_batch makes, got KeyError: 3 (net.py, line 4); correct the function",
    "return [3]": "have a tensor of inputs, or (inputs, target), of 3 samples, got [3] and [3] from net_batch; return",
    "return torch.zeros(4, 2), torch.zeros(3)": "of 3 samples, got [4, 2] and [3] from net_batch; return tensors with",
    "return (torch.zeros(3),) * 3": "of 3 samples, got [3] and [3] and [3] from net_batch; return tensors",
    "return torch.tensor(3)": "of 3 samples, got [] and [] from net_batch; return tensors with batch_size as their",
}


def problem_of(name):
    try:
        spec = model_spec(name)
        spec.make_batch(3, {})
        spec.build()
    except ConfigError as error:
        (problem,) = error.problems
        assert "\n" not in problem
        return problem
    return pytest.fail("nothing was said")


def test_what_is_right_is_not_complained_of(folder):
    write(folder / "net.py", HEAD + BATCH + "def net(): return nn.Sequential(nn.ReLU())")
    model_spec("net.py:net").build()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_nowhere(folder, name):
    text = "def net(): pass\ndef net_batch(): pass\nNUMBER = 3\nfrom torch import nn as _nn\nMODEL = _nn.Sequential()"
    write(folder / "net.py", text)
    found = problem_of(name)
    assert found.startswith("model must ")
    assert NAMES[name] in found


@pytest.mark.parametrize("text", TEXTS)
def test_a_file_that_is_no_model(folder, text):
    write(folder / "net.py", text)
    found = problem_of("net.py:net")
    assert found.startswith("model must ")
    assert TEXTS[text] in found


def test_a_module_with_a_name_that_is_taken(folder):
    write(folder / "json.py", "dumps = 3")
    write(folder / "net.py", HEAD + "import json\ndef net(): return nn.Sequential(nn.ReLU())")
    before = sys.modules["json"]
    assert "got json in json.py and one that is installed; rename yours" in problem_of("net.py:net")
    assert sys.modules["json"] is before


@pytest.mark.parametrize("body", BODIES)
def test_a_function_that_makes_no_model(folder, body):
    write(folder / "net.py", HEAD + f"def net():\n    {body}\n" + BATCH)
    found = problem_of("net.py:net")
    assert found.startswith("model must ")
    assert BODIES[body] in found


@pytest.mark.parametrize("body", BATCHES)
def test_a_function_that_makes_no_batch(folder, body):
    write(
        folder / "net.py", HEAD + f"def net_batch(batch_size):\n    {body}\ndef net(): return nn.Sequential(nn.ReLU())"
    )
    found = problem_of("net.py:net")
    assert found.startswith("model must have ")
    assert BATCHES[body] in found
