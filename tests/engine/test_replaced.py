"""Layers that are replaced in a pipeline that stands: the new one runs, is trained and saved, or is refused."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict

import pytest
import torch
from torch import nn

from gpipe_bench import GPipe, Pipe, WithDevice
from gpipe_bench.engine.batchnorm import DeferredBatchNorm
from gpipe_bench.errors import SkipLayoutError
from tests.engine.support import Do, Pop, Stash

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(stem=nn.Linear(4, 4), norm=nn.BatchNorm1d(4), head=nn.Linear(4, 4)))


def gpipe(module=None, **options) -> GPipe:
    return GPipe(network() if module is None else module, [1, 2], devices=["cpu"] * 2, chunks=3, **options)


def pipe(module=None, **options) -> Pipe:
    return Pipe(network() if module is None else module, 3, balance=[1, 2], **options)


def output(model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    found = model(x)
    return found.local_value() if isinstance(model, Pipe) else found


def double() -> nn.Linear:
    layer = nn.Linear(4, 2, bias=False)
    nn.init.constant_(layer.weight, 2.0)
    return layer


def by_position(model, layer):
    model[-1] = layer


WAYS = {
    "attribute": lambda model, layer: setattr(model, "head", layer),
    "add_module": lambda model, layer: model.add_module("head", layer),
    "set_submodule": lambda model, layer: model.set_submodule("head", layer),
    "position": by_position,
    "_modules": lambda model, layer: model._modules.update(head=layer),
    "away and back": lambda model, layer: (delattr(model, "head"), model.add_module("head", layer)),
}
MAKERS = pytest.mark.parametrize("make", [gpipe, pipe])


@MAKERS
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run_before", [False, True])
def test_the_new_layer_runs_is_trained_and_saved(make, way, run_before):
    model = make()
    if run_before:
        output(model)
    layer = double()
    WAYS[way](model, layer)
    assert (list(model), len(model)) == ([model.stem, model.norm, layer], 3)
    assert list(model.state_dict())[-1] == "head.weight"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    result = output(model)
    plain = nn.Sequential(*copy.deepcopy(list(model.eval())))
    torch.testing.assert_close(output(model), plain(X))
    assert result.shape == (6, 2)
    result.sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, double().weight)
    assert model.partitions[1][1] is layer


def test_layers_keep_their_order_when_the_first_is_taken_out_and_put_back():
    model = gpipe().eval()
    layer = nn.Linear(4, 4)
    del model.stem
    model.stem = layer
    torch.testing.assert_close(model(X), model.head(model.norm(layer(X))))
    assert next(iter(model)) is layer


@MAKERS
def test_a_graph_made_before_is_recomputed_with_the_layer_that_it_was_made_of(make):
    model = make(checkpoint="always")
    old, result = model.head, output(model)
    model.head = double()
    output(model)
    result.sum().backward()
    assert old.weight.grad is not None
    assert model.head.weight.grad is None


@MAKERS
def test_synchronised_batch_normalisation(make):
    model = make()
    assert nn.SyncBatchNorm.convert_sync_batchnorm(model) is model
    assert type(model[1]) is type(model.norm) is nn.SyncBatchNorm
    output(model)
    assert type(model.partitions[1][0]) is nn.SyncBatchNorm


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@MAKERS
def test_a_layer_gives_way_to_its_compiled_form(make):
    model = make().eval()
    expected = output(model)
    model.stem = torch.compile(model.stem, backend="eager")
    torch.testing.assert_close(output(model), expected)
    assert type(model.partitions[0][0]).__name__ == "OptimizedModule"


@MAKERS
def test_copies_of_a_pipeline_with_a_new_layer(make):
    model = make().eval()
    model.head = double()
    torch.testing.assert_close(output(copy.deepcopy(model)), output(model))


def test_a_new_batch_normalisation_is_deferred_like_the_others():
    model = gpipe(deferred_batch_norm=True)
    model.stem = nn.BatchNorm1d(4)
    model(X)
    assert isinstance(model.stem, DeferredBatchNorm)
    assert model.stem.num_batches_tracked == 1
    torch.testing.assert_close(model.stem.running_mean, 0.1 * X.mean(0))


def test_a_layer_that_draws_takes_the_place_of_one_that_does_not():
    model = gpipe(checkpoint="always")
    for _ in range(2):
        model(X).sum().backward()
    model.stem = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    model(X).sum().backward()
    assert model.stem[0].weight.grad is not None


def test_skips_follow():
    model = GPipe(nn.Sequential(Stash(), nn.Identity(), Pop()), [1, 1, 1], devices=["cpu"] * 3, chunks=2)
    before = model(X)
    model[1], model[2] = Pop(), nn.Identity()
    torch.testing.assert_close(model(X), before)
    model[1] = nn.Identity()
    with pytest.raises(SkipLayoutError, match="no layer reads 'skip'"):
        model(X)
    model[1] = Pop()
    torch.testing.assert_close(model(X), before)


def test_an_inner_sequential_of_several_values_and_a_layer_with_device():
    def given_twice(x):
        return x, x

    model = pipe().eval()
    model.stem = nn.Sequential(Do(given_twice), nn.Bilinear(4, 4, 4))
    model.head = WithDevice(double(), "cpu")
    output(model)
    assert [name for name in model.state_dict() if not name.startswith("norm")] == [
        "stem.1.weight",
        "stem.1.bias",
        "head.weight",
    ]


def test_layers_with_names_of_attributes():
    model = gpipe(nn.Sequential(OrderedDict(devices=nn.Linear(4, 4), chunks=nn.Linear(4, 4), _lock=nn.Linear(4, 4))))
    model.chunks = 2
    model.devices = nn.Linear(4, 4)
    assert model.chunks == 2
    assert [device.type for device in model.devices] == ["cpu"] * 2
    torch.testing.assert_close(model(X), nn.Sequential(*model)(X))


def shared(model):
    model.head = model.stem


def within(model):
    model.head = nn.Sequential(model.stem)


def in_partition(model):
    model.partitions[1][1] = nn.Linear(4, 4)


REFUSED = {
    "more": (lambda model: setattr(model, "tail", nn.ReLU()), "got ['tail'] added or removed; make a new pipeline"),
    "fewer": (lambda model: delattr(model, "norm"), "got ['norm'] added or removed"),
    "None": (lambda model: setattr(model, "norm", None), "got None in the place of 'norm'; put an nn.Identity() there"),
    "elsewhere": (
        lambda model: setattr(model, "head", nn.Linear(4, 4, device="meta")),
        "got 'head' on meta in a partition on cpu; move it with .to('cpu') first",
    ),
    "one twice": (shared, "got one module as children"),
    "one within another": (within, "got '0' of child 'head' shared with child 'stem'"),
    "partition": (in_partition, "got another layer in pipe.partitions; write pipe[index] = layer"),
}


@MAKERS
@pytest.mark.parametrize("name", REFUSED)
def test_refused(make, name):
    model = make()
    REFUSED[name][0](model)
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(REFUSED[name][1])):
            model(X)


@MAKERS
def test_after_a_refusal_the_pipeline_is_as_usable_as_before(make):
    model = make()
    old = model.norm
    model.norm = None
    with pytest.raises(ValueError, match="got None"):
        model(X)
    model.norm = old
    assert output(model).shape == X.shape


def test_a_layer_for_an_empty_pipeline():
    model = Pipe(nn.Sequential())
    model.head = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"got \['head'\] added"):
        model(X)


def test_an_index_beyond_the_layers():
    with pytest.raises(IndexError):
        gpipe()[3] = nn.ReLU()
