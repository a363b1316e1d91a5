"""GPT-2: its published sizes, its attention, its tokens, and its traces beside live tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench import GPipe
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.table import MODELS, parse_arguments
from gpipe_bench.simulator import Model, simulate
from tests.simulator.live import live_peaks
from tests.simulator_costs.layers import flop, ops, suite_tracer

SMALL = {"L": 2, "D": 16, "heads": 4, "vocabulary": 23, "context": 8, "dropout": 0.0}
# Parameters as published, with the token embedding as the weight of the head.
PUBLISHED = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def made(**changes):
    torch.manual_seed(0)
    return MODELS["gpt2"].build(**{**SMALL, **changes})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_size_has_as_many_parameters_as_published(name):
    with torch.device("meta"):
        model = MODELS[name].build()
    head = model.get_submodule("head.linear").weight
    assert head.shape == model.get_submodule("embedding.tokens").weight.shape
    assert sum(parameter.numel() for parameter in model.parameters()) - head.numel() == PUBLISHED[name]


def test_the_head_has_a_weight_of_its_own():
    with torch.device("meta"):
        model = MODELS["gpt2"].build()
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED["gpt2"] + 50257 * 768


def test_a_token_depends_on_those_before_it_only():
    model = made().eval()
    tokens, _ = MODELS["gpt2"].make_batch(2, SMALL, torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % SMALL["vocabulary"]
    one, other = model(tokens), model(changed)
    torch.testing.assert_close(other[:, :5], one[:, :5])
    assert all(not torch.allclose(other[:, place], one[:, place]) for place in (5, 6, 7))


def test_the_target_is_the_next_token():
    tokens, target = MODELS["gpt2"].make_batch(3, SMALL, torch.Generator().manual_seed(0))
    assert (tokens.shape, tokens.dtype, target.shape, target.dtype) == ((3, 8), torch.int64, (3, 8), torch.int64)
    assert torch.equal(tokens[:, 1:], target[:, :-1])
    assert set(tokens.unique().tolist()) <= set(range(SMALL["vocabulary"]))


def test_the_loss_is_the_cross_entropy_of_all_tokens():
    logits = torch.randn(3, 8, 23)
    target = torch.randint(23, (3, 8))
    expected = -logits.log_softmax(-1).gather(-1, target[..., None]).mean()
    torch.testing.assert_close(MODELS["gpt2"].loss(logits, target), expected)


def test_fresh_weights_know_nothing():
    model = made(D=32).eval()
    tokens, target = MODELS["gpt2"].make_batch(8, SMALL, torch.Generator().manual_seed(0))
    assert abs(MODELS["gpt2"].loss(model(tokens), target).item() - torch.tensor(23.0).log().item()) < 0.1


def test_dropout_reaches_every_layer():
    model = made(dropout=0.25)
    assert {layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)} == {0.25}
    # Of the attention, too, which has no layer of its own for it.
    attention, x = model.get_submodule("attention0"), torch.randn(2, 8, 16)
    attention.dropout.p, attention.project.bias.data = 0.0, torch.zeros(16)
    assert torch.equal(attention(x), attention(x))
    attention.dropout.p = 0.5
    assert not torch.equal(attention(x), attention(x))


def test_it_learns_in_a_pipeline():
    torch.manual_seed(0)
    spec, model = MODELS["gpt2"], made()
    tokens, target = spec.make_batch(4, SMALL, torch.Generator().manual_seed(0))
    pipe = GPipe(model, [2, 2, 2], devices=["cpu"] * 3, chunks=2)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = spec.loss(pipe(tokens), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_width_is_shared_out_among_the_heads():
    with pytest.raises(ConfigError, match="D must be a multiple of heads = 12: heads share the width, got 100; change"):
        parse_arguments("gpt2", "D=100")


def test_matrix_products_cost_six_operations_per_weight_and_token():
    layers, tokens = SMALL["L"], 2 * SMALL["context"]
    traced = suite_tracer("gpt2", **SMALL).trace(2)
    products = layers * 12 * SMALL["D"] ** 2 + SMALL["vocabulary"] * SMALL["D"]
    # Scores and what they mix, for each token and those that it sees: itself and the ones before it.
    seen = SMALL["context"] * (SMALL["context"] + 1) // 2
    scores = layers * 2 * 2 * 2 * seen * SMALL["D"]
    assert 2 * products * tokens + scores <= flop(traced, "forward") < 1.5 * (2 * products * tokens + scores)
    assert 4 * products * tokens + 2 * scores <= flop(traced, "backward")
    assert any("attention" in op for op in ops(traced, "forward"))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_it_is_simulated_for_every_batch_size(batch_size):
    step = simulate(Model("gpt2", SMALL), balance=[3, 3], batch_size=batch_size, chunks=min(2, batch_size))
    assert step.status == "ok"


def test_memory_and_time_of_gpt2_small_are_those_of_its_size():
    step = simulate(Model("gpt2", {}), balance=[26], batch_size=8, profile="a100", optimizer="adam", checkpoint="never")
    parameters = PUBLISHED["gpt2"] + 50257 * 768
    # Weights, gradients and both moments in float32; logits, their gradient and the softmax of one batch.
    least = (16 * parameters + 3 * 8 * 1024 * 50257 * 4) / 2**30
    assert least < step.peak_allocated_gib < 5 * least
    # Six operations per parameter and token, at 19.5 TFLOP/s of float32 at the best.
    fastest = 19.5e12 / (6 * parameters * 1024)
    assert fastest / 4 < step.throughput_samples_per_s < fastest


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("m", [1, 2])
def test_live_bytes_are_those_of_the_engine(checkpoint, m):
    sizes = {**SMALL, "D": 32, "context": 64, "vocabulary": 199}
    tokens, _ = MODELS["gpt2"].make_batch(4, sizes, torch.Generator().manual_seed(0))
    real, simulated = live_peaks(made(**sizes), tokens, [3, 2, 1], m=m, checkpoint=checkpoint)
    assert simulated == pytest.approx(real, rel=0.002)
