"""Bad input is one clear error, before anything is simulated."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench.components import Components
from gpipe_bench.engine.gpipe import GPipe
from gpipe_bench.errors import BalanceError, ConfigError, SkipLayoutError, TraceError
from gpipe_bench.simulator import Model, simulate
from tests.simulator_api.layers import Function, Pop, Stash, linear, sequence


def attempt(**changes):
    """A simulation that works, but for ``changes``."""
    options = {"model": nn.Sequential(linear(), linear()), "balance": [1, 1], "batch_size": 4, "sample": sequence()}
    options |= changes
    return simulate(options.pop("model"), **options)


def test_the_base_of_the_cases_works():
    assert attempt().status == "ok"


WRONG = {
    "model": [linear(), "unet", None],
    "balance": [[], "1-1", [0, 2], [1.0, 1], [True, True], 2],
    "batch_size": [0, -1, 2.0, "4", True, None],
    "chunks": [0, 1.5, False],
    "steps": [0, 2.5],
    "checkpoint": ["sometimes", None],
    "components": ["baseline", None, {}],
    "schedule": ["zigzag", 3, [[1, 2]], [["F", 0]]],
    "transfer": ["nvlink"],
    "optimizer": ["sgdm", 3],
    "precision": ["half", "fp16", torch.float16, None],
    "profile": [17, "p41", "nowhere.yaml"],
    "launch_us": [0, -1.0, float("nan"), 1e300, True, "10"],
    "devices": [[0], [0, -1], ["cuda:0", "cuda:1"], 2, [0, 10**9]],
    "hosts": [0, 1.0, True, 3],
    "network": ["ndr", 3, None],
    "sample": [
        None,
        [1, 2],
        (),
        torch.tensor(1.0),
        torch.empty(0, 16),
        (torch.empty(1), None),
        (sequence(), torch.empty(7)),
    ],
    "flavour": ["old"],
    "memory": ["yes"],
    "cache": [3],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]], ids=repr)
def test_a_wrong_argument_is_named(name, value):
    with pytest.raises((ConfigError, BalanceError), match=rf"^{name} must .*; ") as caught:
        attempt(**{name: value})
    assert len(str(caught.value)) < 300


def test_numbers_of_devices_end_somewhere():
    near, far = (attempt(devices=[0, last], steps=1) for last in (1, 2**16 - 1))
    assert (far.step_time_ms, far.peak_allocated_gib) == (near.step_time_ms, near.peak_allocated_gib)
    with pytest.raises(ConfigError, match="devices must be numbers below 65536, got 65536; number them from 0 on"):
        attempt(devices=[0, 2**16])


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        attempt(batch_size=0, checkpoint="x", transfer="x", devices=[1])
    assert [text.split()[0] for text in caught.value.problems] == ["batch_size", "checkpoint", "transfer", "devices"]


def test_a_balance_that_does_not_add_up():
    with pytest.raises(BalanceError, match="2 layers"):
        attempt(balance=[1, 2])


def test_loss_and_target_belong_together():
    loss = functional.mse_loss
    with pytest.raises(ConfigError, match="loss and target must be given together"):
        attempt(loss=loss)
    with pytest.raises(ConfigError, match="loss and target must be given together"):
        attempt(target=torch.empty(4))
    with pytest.raises(ConfigError, match="batch_size = 4 samples, got 3"):
        attempt(loss=loss, target=torch.empty(3, 8, 16))
    assert attempt(loss=loss, target=torch.empty(4, 8, 16)).status == "ok"


def test_a_loss_gives_one_number():
    with pytest.raises(TraceError, match=r"loss must give one number, got tensors of shape \[\[4, 8, 16\]\]"):
        attempt(loss=lambda output, target: output - target, target=torch.empty(4, 8, 16))


class Backwards(nn.Sequential):
    def forward(self, x):
        return self[0](self[1](x))


REFUSED = {
    "one module twice": lambda: nn.Sequential(*[linear()] * 2),
    "a forward of its own": lambda: Backwards(linear(), linear()),
}


@pytest.mark.parametrize("module", REFUSED.values(), ids=REFUSED)
def test_what_the_engine_refuses_is_not_simulated(module):
    with pytest.raises((TypeError, ValueError)) as engine:
        GPipe(module(), [1, 1], devices=["cpu"] * 2)
    with pytest.raises(ConfigError) as simulator:
        attempt(model=module())
    assert str(simulator.value) == str(engine.value)


def test_a_model_that_computes_nothing():
    with pytest.raises(ConfigError, match="model must have something to compute"):
        attempt(model=nn.Sequential(nn.Flatten()), balance=[1], optimizer=None)


@pytest.mark.parametrize("batch_size", [10**16, 10**18, 10**30])
@pytest.mark.parametrize("memory", [True, False])
def test_numbers_that_no_64_bits_hold(batch_size, memory):
    with pytest.raises(ConfigError, match=r"must add up to less than 1.2e\+18, got .*; use a smaller batch"):
        attempt(batch_size=batch_size, memory=memory)


def test_a_model_of_the_suite_brings_its_own_batch():
    with pytest.raises(ConfigError, match="sample must be None"):
        attempt(model=Model("unet", {"depth": 1}))
    with pytest.raises(ConfigError, match=r"model must be one of .*, got 'unett'; use 'unet'"):
        attempt(model=Model("unett", {}), sample=None)
    with pytest.raises(ConfigError, match="depth of unet must be an integer"):
        attempt(model=Model("unet", {"depth": 1.5}), sample=None)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.Linear(5, 5), "reduction dim"),
        (Function(lambda x: x if x.sum() > 0 else -x), "meta"),
        (Function(lambda x: x * x.mean().item()), "meta"),
        (Function(lambda x: x[x > 0]), "nonzero"),
        (nn.LazyLinear(4), "uninitialized"),
        (Function(lambda x: 1 / 0), "ZeroDivisionError"),
    ],
    ids=["shape", "branch", "item", "values", "lazy", "any"],
)
def test_a_layer_that_cannot_be_traced_is_named(layer, why):
    with pytest.raises(TraceError, match=rf"layer 1 \({type(layer).__name__}\) must run .*{why}"):
        attempt(model=nn.Sequential(linear(), layer))


@pytest.mark.parametrize("function", [torch.unique, torch.bincount], ids=["unique", "bincount"])
def test_an_operator_that_pytorch_knows_no_shapes_of_is_said_to_be_one(function):
    layer = Function(lambda x: x * function(x.detach().long().flatten()).sum())
    with pytest.raises(TraceError, match=r"PyTorch cannot say what this operator gives .*: simulate another one"):
        attempt(model=nn.Sequential(linear(), layer))


def test_a_loss_that_does_not_fit_the_output():
    with pytest.raises(TraceError, match="loss must run"):
        attempt(loss=functional.nll_loss, target=torch.zeros(4, 3, dtype=torch.int64))


def test_skips_that_do_not_match():
    with pytest.raises(SkipLayoutError):
        attempt(model=nn.Sequential(Stash(), linear()))
    with pytest.raises(SkipLayoutError):
        attempt(model=nn.Sequential(Pop(), Stash()))


def test_a_normalisation_that_needs_more_samples_than_a_microbatch_has():
    module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    with pytest.raises(TraceError, match=r"Expected more than 1 value per channel .*; take fewer chunks"):
        attempt(model=module, sample=torch.empty(1, 16), chunks=4)
    assert attempt(model=module, sample=torch.empty(1, 16), chunks=2).status == "ok"


def test_components_are_a_value():
    assert attempt(components=Components(portals=False)).row().variant == "dep-str-x"
