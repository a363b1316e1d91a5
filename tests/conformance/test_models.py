"""What every model of the suite must do: build, split, train as the plain model does, be copied, traced, balanced."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gpipe_bench import GPipe, Pipe
from gpipe_bench.balance import balance_by_simulation, balance_by_size
from gpipe_bench.judge.adapters.gpipe_bench import GpipeBench
from gpipe_bench.judge.adapters.plain import Plain, PlainPipe
from gpipe_bench.judge.protocol import Case, Loss, Notes, Session, Setup
from gpipe_bench.judge.runner import play
from gpipe_bench.judge.scripts import same
from gpipe_bench.models.table import MODELS, format_arguments, model_spec, parse_arguments
from gpipe_bench.simulator import Model, simulate
from gpipe_bench.skip import verify_skippables
from tests.conformance.cases import CASES
from tests.engine.support import Do

every_model = pytest.mark.parametrize("name", CASES)
BATCH = 4
TUPLES = {"experts"}
"""Models whose layers take a tuple as one input, which ``Pipe`` hands on as several inputs, as PyTorch's did."""


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@cache
def made(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    module = model_spec(name).build(**CASES[name].arguments).double()
    for layer in module.modules():
        if isinstance(layer, nn.Dropout | nn.Dropout2d):
            layer.p = 0.0
    return module


def batch(name: str) -> tuple[Tensor, Tensor]:
    x, target = model_spec(name).make_batch(BATCH, CASES[name].arguments, torch.Generator().manual_seed(1))
    return as_double(x), as_double(target)


def as_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def even(layers: int, n: int) -> list[int]:
    return [layers // n + (j < layers % n) for j in range(n)]


class Called(Plain):
    """A function of the batch and the model, or of a pipeline that is made of the model."""

    def __init__(self, call, make=lambda model: model):
        self.call, self.make = call, make

    def build(self, model, setup):
        return PlainPipe(model, Do(self.call, self.make(model)))


# Micro-batch by micro-batch: statistics of batch norm are those of a micro-batch.
LOOP = Called(lambda x, model: tree_map(lambda *parts: torch.cat(parts), *map(model, x.chunk(2))))
SUCCESSOR = Called(lambda x, pipe: pipe(x).local_value(), lambda model: Pipe(model, 2, balance=even(len(model), 2)))


def case(name: str, engine: Any, checkpoint: str = "never") -> Case:
    """A step in four partitions, and its gradients."""

    def script(session: Session) -> None:
        session.step(*batch(name), Loss(model_spec(name).loss))
        session.grads()

    module = copy.deepcopy(made(name))
    setup = Setup(4 // engine.per_device, 2, checkpoint, engine.per_device, cut=tuple(even(len(module), 4)))
    return Case(setup, lambda: module, script)


@cache
def plain_step(name: str) -> Notes:
    return play(LOOP, case(name, LOOP))[0]


def difference(name: str, engine: Any, checkpoint: str = "never") -> str | None:
    """What a step of an engine has that the plain model has not."""
    found, error = play(engine, own := case(name, engine, checkpoint))
    return error or same(own, plain_step(name), found)


def test_every_registered_model_is_here():
    assert set(MODELS) <= set(CASES)


@every_model
def test_it_is_a_sequential_of_as_many_layers_as_the_table_says(name):
    spec, arguments = model_spec(name), CASES[name].arguments
    with torch.device("meta"):
        module = spec.build(**arguments)

    assert isinstance(module, nn.Sequential)
    assert len(module) == spec.layers(spec.check(arguments)) >= CASES[name].layers
    assert all(parameter.is_meta for parameter in module.parameters())
    verify_skippables(module)


@every_model
def test_its_arguments_go_through_text(name):
    values = model_spec(name).check(CASES[name].arguments)

    assert parse_arguments(name, format_arguments(values)) == values


@every_model
def test_equal_seeds_give_equal_weights_and_batches(name):
    torch.manual_seed(0)
    again = model_spec(name).build(**CASES[name].arguments).double()

    torch.testing.assert_close(dict(again.state_dict()), dict(made(name).state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(batch(name), batch(name), rtol=0, atol=0)


@every_model
@pytest.mark.parametrize("schedule", ["", "1f1b", "zb_v"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_pipeline_trains_it_as_the_plain_model(name, schedule, checkpoint):
    assert not difference(name, GpipeBench(schedule), checkpoint)


@pytest.mark.parametrize("name", sorted(CASES.keys() - TUPLES))
def test_the_successor_of_pytorchs_pipe_takes_it(name):
    assert not difference(name, SUCCESSOR)


@every_model
def test_weights_go_in_and_out_and_it_evaluates_under_inference_mode(name):
    plain = copy.deepcopy(made(name)).eval()
    torch.manual_seed(9)
    other = model_spec(name).build(**CASES[name].arguments).double()
    pipe = GPipe(other, even(len(other), 2), devices=["cpu"] * 2, chunks=2).eval()

    pipe.load_state_dict(plain.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(pipe(batch(name)[0]), plain(batch(name)[0]))
    plain.load_state_dict(pipe.state_dict())


@every_model
@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_as_good(name, again):
    with torch.no_grad():
        x, _ = batch(name)
        expected = copy.deepcopy(made(name)).eval()(x)
        twin = again(copy.deepcopy(made(name)).eval())
        pipe = GPipe(twin, even(len(twin), 2), devices=["cpu"] * 2, chunks=2).eval()

        torch.testing.assert_close(pipe(x), expected)


@every_model
def test_it_is_simulated_and_balanced(name):
    model = Model(name, CASES[name].arguments)
    spec = model_spec(name)
    with torch.device("meta"):
        module = spec.build(**CASES[name].arguments)
        sample, _ = spec.make_batch(8, CASES[name].arguments, device="meta")

    balance = balance_by_simulation(2, model, batch_size=8, chunks=2)
    step = simulate(model, balance=balance, batch_size=8, chunks=2, profile="h100")

    assert sum(balance) == sum(balance_by_size(2, module, sample, chunks=2)) == len(module)
    assert step.status == "ok"
    assert step.throughput_samples_per_s > 0
    assert all(use.peak_allocated_gib > 0 for use in step.devices)
