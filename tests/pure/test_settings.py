"""Settings of a pipeline: one rule and one sentence, whoever is asked; defaults that agree."""

import inspect
from dataclasses import MISSING, fields

import numpy as np
import pytest
import torch

from gpipe_bench import GPipe
from gpipe_bench.balance import balance_by_simulation, balance_by_size
from gpipe_bench.emulator.api import emulate
from gpipe_bench.settings import Chunks, checked, setting_of
from gpipe_bench.simulator import Model, simulate
from gpipe_bench.step.request import Request, Tf32, microbatch_sizes
from gpipe_bench.suite.cells import MeasuredCell
from gpipe_bench.suite.emulated_cells import EmulatedCell
from gpipe_bench.suite.simulated_cells import SimulatedCell
from gpipe_bench.suite.validation import validated

KINDS = (MeasuredCell, SimulatedCell, EmulatedCell)


def layers():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def cells(name, value):
    return [lambda kind=kind: validated(kind, {name: value}, ".".join) for kind in KINDS]


def sentences(calls):
    for call in calls:
        with pytest.raises(ValueError, match="must be") as caught:
            call()
        yield str(caught.value)


@pytest.mark.parametrize("value", [0, -3, 2.5, True, "4", None, [1]], ids=repr)
def test_chunks_are_refused_in_one_sentence(value):
    calls = [
        lambda: GPipe(layers(), [1, 1], devices=["cpu"] * 2, chunks=value),
        lambda: simulate(Model("unet", {}), balance=[1], batch_size=4, chunks=value),
        lambda: emulate(Model("unet", {}), balance=[1], batch_size=4, chunks=value),
        lambda: balance_by_size(1, layers(), torch.ones(4, 2), chunks=value),
        lambda: balance_by_simulation(1, layers(), torch.ones(4, 2), chunks=value),
        lambda: microbatch_sizes(4, value),
        *cells("chunks", value),
    ]
    assert {*sentences(calls)} == {f"chunks must be a whole number of at least 1, got {value!r}; use 1 or more"}


@pytest.mark.parametrize("value", ["exept_last", 3, None], ids=repr)
def test_a_checkpoint_mode_is_refused_in_one_sentence(value):
    calls = [
        lambda: GPipe(layers(), [1, 1], devices=["cpu"] * 2, checkpoint=value),
        lambda: simulate(Model("unet", {}), balance=[1], batch_size=4, checkpoint=value),
        lambda: emulate(Model("unet", {}), balance=[1], batch_size=4, checkpoint=value),
        lambda: balance_by_simulation(1, layers(), torch.ones(4, 2), checkpoint=value),
        *cells("checkpoint", value),
    ]
    advice = "use 'except_last'" if isinstance(value, str) else "use one of always, except_last, never"
    rule = "checkpoint must be one of always, except_last, never"
    assert {*sentences(calls)} == {f"{rule}, got {value!r}; {advice}"}


def test_numbers_of_numpy_are_pythons():
    given = {"batch_size": np.int64(4), "chunks": np.int32(2), "balance": np.array([1, 1]).tolist()}
    step = simulate(layers(), sample=torch.ones(4, 2), **given)
    assert step.status == "ok"
    assert [type(step.settings[name]) for name in ("batch_size", "chunks")] == [int, int]
    assert type(checked("chunks", Chunks, np.int16(3))) is int


def test_only_plain_data_has_upper_limits():
    assert checked("chunks", Chunks, 10**6) == 10**6
    with pytest.raises(ValueError, match="chunks must be at most 65536, got 1000000; lower it"):
        validated(SimulatedCell, {"chunks": 10**6}, ".".join)


def test_a_setting_may_be_none_where_its_type_says_so():
    assert checked("tf32", Tf32, None) is None
    with pytest.raises(TypeError, match="tf32 must be True or False, got 'no'; use one of them"):
        checked("tf32", Tf32, "no")


def test_defaults_agree():
    """But for those that describe the small U-Net of a cell, and the engine of the published runs."""
    own = {"chunks", "flavour", "devices"}
    requested = {field.name: field.default for field in fields(Request) if field.default is not MISSING}
    for function, kind in ((simulate, SimulatedCell), (emulate, EmulatedCell)):
        arguments = {name: one.default for name, one in inspect.signature(function).parameters.items()}
        for name in arguments.keys() & kind.model_fields.keys() - own:
            assert arguments[name] in (kind.model_fields[name].default, inspect.Parameter.empty), name
        for name in arguments.keys() & requested.keys():
            assert arguments[name] == requested[name], name


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_of_a_cell_is_declared(kind):
    assert [name for name, field in kind.model_fields.items() if setting_of(field) is None] == ["evidence"]
