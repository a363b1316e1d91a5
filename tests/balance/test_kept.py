"""Costs are kept on disk under what they depend on, and under nothing less."""

from __future__ import annotations

import functools
import operator
import subprocess
import sys

import pytest
import torch
from torch import nn

from gpipe_bench.balance import by_time, layer_sizes, layer_times
from gpipe_bench.balance.fingerprint import fingerprint
from gpipe_bench.balance.kept import kept_costs
from gpipe_bench.models.table import MODELS
from tests.conformance.cases import CASES

SAMPLE = torch.zeros(2, 4)


class Scale(nn.Module):
    def __init__(self, factor: object) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def made(factor: object = 2, width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), Scale(factor), nn.Dropout(0.5))


def test_models_that_are_made_alike_have_one_fingerprint() -> None:
    assert fingerprint(made()) == fingerprint(made())
    with torch.device("meta"):
        assert fingerprint(made()) == fingerprint(made().eval())


def frozen() -> nn.Sequential:
    module = made()
    module[0].weight.requires_grad_(False)
    return module


def other_code() -> nn.Sequential:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 2

        def forward(self, x):
            return x + self.factor

    Scale.__qualname__ = "Scale"
    return nn.Sequential(made()[0], Scale(), nn.Dropout(0.5))


OTHERS = {
    "attribute": lambda: made(3),
    "kind of number": lambda: made(2.0),
    "shape": lambda: made(width=5),
    "layer": lambda: nn.Sequential(*made()[:2], nn.Dropout(0.25)),
    "type": lambda: made().double(),
    "name": lambda: nn.Sequential(made()),
    "frozen": frozen,
    "code": other_code,
    "partial": lambda: made(functools.partial(max, 3)),
    "nested": lambda: made({"a": [1, (2, None)], "b": {"c"}}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_have_others(name) -> None:
    assert fingerprint(OTHERS[name]()) not in (None, fingerprint(made()))


SOURCE = """
from torch import nn


def decorated(method):
    def call(self):
        return method(self)

    return call


def scaled(x):
    return x * 2


class Base(nn.Module):
    words = {'a', 'b'}

    def grown(self, x, by=1):
        return x + by


class Scale(Base):
    def __init__(self):
        super().__init__()
        self.function = lambda x: x + 5

    @staticmethod
    def shrunk(x):
        return x - 3

    @property
    def factor(self):
        return 4

    @decorated
    def six(self):
        return 6

    def forward(self, x):
        return scaled(self.grown(self.shrunk(x))) * self.factor if x in {'a', 'b', 'c'} else self.function(x)
"""
CHANGES = {
    "function": ("x * 2", "x * 3"),
    "method of a base": ("x + by", "x - by"),
    "default": ("by=1", "by=2"),
    "attribute of a class": ("{'a', 'b'}\n", "{'a', 'c'}\n"),
    "static method": ("x - 3", "x - 4"),
    "property": ("return 4", "return 5"),
    "attribute that is a function": ("x + 5", "x + 7"),
    "decorated method": ("return 6", "return 7"),
    "forward": ("self.factor if", "self.factor + 1 if"),
}


def written(source: str) -> nn.Sequential:
    names = {"__name__": "written"}
    exec(source, names)
    return nn.Sequential(names["Scale"]())


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_code_that_a_layer_runs_makes_it_another_one(change) -> None:
    assert SOURCE.count(CHANGES[change][0]) == 1
    assert fingerprint(written(SOURCE)) == fingerprint(written(SOURCE)) is not None
    assert fingerprint(written(SOURCE.replace(*CHANGES[change]))) not in (None, fingerprint(written(SOURCE)))


def test_a_fingerprint_is_that_of_every_process() -> None:
    program = (
        "from tests.balance.test_kept import *; print(fingerprint(written(SOURCE)), fingerprint(made({'a', 'b'})))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_a_model_with_a_thing_that_cannot_be_described_has_none() -> None:
    assert fingerprint(made(object())) is None
    assert fingerprint(made([].append)) is None
    assert fingerprint(made(made().forward)) is None
    assert None not in {fingerprint(made(function)) for function in (torch.flatten, operator.iadd, max, made)}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_suite_can_be_kept(name) -> None:
    with torch.device("meta"):
        one, other = (MODELS[name].build(**CASES[name].arguments) for _ in range(2))

    assert fingerprint(one) == fingerprint(other) is not None


def test_what_was_measured_is_not_measured_again(tmp_path) -> None:
    calls = []

    def measure() -> list[float]:
        calls.append(1)
        return [1.5, 2.0, 0.25]

    def ask(module=None, sample=SAMPLE, **question):
        return kept_costs(tmp_path, module or made(), sample, {"cost": "time", **question}, measure)

    for _ in range(2):
        assert ask() == [1.5, 2.0, 0.25]
    assert len(calls) == 1
    for changed in ({"device": "gpu"}, {"sample": torch.zeros(3, 4)}, {"module": made(3)}):
        ask(**changed)
    assert len(calls) == 4
    for _ in range(2):
        ask(made(object()))
    assert len(calls) == 6
    for file in tmp_path.iterdir():
        file.write_text("[1, ")
    assert ask() == [1.5, 2.0, 0.25]
    assert len(calls) == 7
    for file in tmp_path.iterdir():
        file.write_text(file.read_text().replace("0.25", "0.26"))
    assert ask() == [1.5, 2.0, 0.25]
    assert len(calls) == 8


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path) -> None:
    (tmp_path / "file").touch()
    assert kept_costs(tmp_path / "file" / "x", made(), SAMPLE, {}, lambda: [1.0]) == [1.0]


def test_profilers_ask_it(tmp_path, monkeypatch) -> None:
    module = made()
    times = layer_times(module, SAMPLE, timeout=0, cache=tmp_path)
    sizes = layer_sizes(module, SAMPLE, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2

    monkeypatch.setattr(by_time, "_medians", None)
    assert layer_times(module, SAMPLE, timeout=0, cache=tmp_path) == times
    assert layer_sizes(module, SAMPLE, cache=tmp_path) == sizes
    layer_sizes(module, SAMPLE, param_scale=3, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
