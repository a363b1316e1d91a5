"""Networks of published runs: found by name, not listed, and what their papers say they are."""

from __future__ import annotations

import pytest
import torch

from gpipe_bench.models.published import PUBLISHED
from gpipe_bench.models.table import MODELS

SMALL = {"L": 2, "D": 8, "heads": 2, "vocabulary": 11, "context": 6}
SIZES = {"resnet101": {"size": 32}, "llama": {**SMALL, "hidden": 16}}


def made(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name].build(**SIZES.get(name, SMALL)).eval()


@pytest.mark.parametrize("name", [spec.name for spec in PUBLISHED])
def test_they_are_found_by_name_and_learn(name):
    assert name not in list(MODELS)
    spec, arguments, model = MODELS[name], SIZES.get(name, SMALL), made(name)
    assert len(model) == spec.layers(spec.check(arguments))
    inputs, target = spec.make_batch(2, arguments, torch.Generator().manual_seed(0))
    spec.loss(model(inputs), target).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_attention_that_is_written_out_is_that_of_gpt2():
    ours, other = made("megatron-gpt2"), MODELS["gpt2"].build(**SMALL).eval()
    other.load_state_dict(ours.state_dict())
    tokens, _ = MODELS["gpt2"].make_batch(3, SMALL, torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(tokens), other(tokens))


@pytest.mark.parametrize(("name", "sees"), [("megatron-bert", True), ("megatron-gpt2", False), ("llama", False)])
def test_only_bert_sees_later_tokens(name, sees):
    model = made(name)
    tokens = torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, -1] = 10
    first, second = model(tokens)[0, 0], model(changed)[0, 0]
    assert torch.equal(first, second) is not sees


def test_llama_tells_places_apart():
    tokens = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    first, second = made("llama")(tokens)[:, -1]
    assert not torch.allclose(first, second)


def test_llama_of_8_billion_parameters_has_as_many_as_nanotron_says():
    with torch.device("meta"):
        model = MODELS["llama"].build(L=32, D=4096, heads=32, hidden=14336)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(8.86e9, rel=1e-3)
