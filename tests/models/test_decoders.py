"""Today's decoders: published sizes, what each part does, and gradients that are the plain module's bit by bit."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe
from gpipe_bench.distributed import Pipe
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.experts import Experts, Mixture
from gpipe_bench.models.llama import Attention, Sizes
from gpipe_bench.models.table import MODELS
from gpipe_bench.schedules import SCHEDULES, named_schedule
from tests.cover import cover
from tests.distributed.ranks import run_processes
from tests.engine.steps import DOUBLE
from tests.engine.support import MODES
from tests.models.decoders import CHUNKS, SMALL, balance, batch, expected, made

ALL = [*product(SMALL, (None, *SCHEDULES), MODES)]
# Parameters that a source prints. The first two: the presets of keras_hub, and the page of the model on Hugging Face,
# which counts the tied embedding once.
LLAMA_3_8B, LLAMA_32_1B, MIXTRAL_8X7B = 8_030_261_248, 1_235_814_400, 46_702_792_704
every_model = pytest.mark.parametrize("name", SMALL)


# --- sizes ----------------------------------------------------------------------------------------------------------


def parameters(name, **arguments):
    with torch.device("meta"):
        return dict(MODELS[name].build(**arguments).named_parameters())


def count(named):
    return sum(parameter.numel() for parameter in named.values())


def test_decoders_have_as_many_parameters_as_published():
    small = parameters("decoder", L=16, D=2048, hidden=8192)
    assert count(parameters("decoder")) == LLAMA_3_8B
    assert count(small) - small["head.linear.weight"].numel() == LLAMA_32_1B
    assert count(parameters("experts")) == MIXTRAL_8X7B


def test_a_tied_weight_counts_once():
    named = parameters("multi-token")
    assert count({name: value for name, value in named.items() if not name.startswith("block16.")}) == LLAMA_32_1B


@pytest.mark.parametrize(("streams", "printed"), [(2, 0.0002625), (4, 0.0003940)])
def test_hyper_connections_have_as_many_parameters_as_their_paper_prints_in_billions(streams, printed):
    inside = (".attention", ".mlp", ".inner.", "embedding.", "head.")
    named = parameters("hyper-connections", streams=streams)
    own = {name: parameter for name, parameter in named.items() if not any(part in name for part in inside)}
    assert round(count(own) / 1e9, 7) == printed


# --- what each part does --------------------------------------------------------------------------------------------


def logits(name, x):
    found = made(name)(x)
    return found[0] if name == "experts" else found


@pytest.mark.parametrize("name", ["decoder", "attention-residuals", "hyper-connections", "captions"])
def test_a_token_depends_on_those_before_it_only(name):
    x, _ = batch(name)
    changed = x.clone()
    changed[:, -3] = (changed[:, -3] + 1) % 32
    one, other = logits(name, x), logits(name, changed)
    assert torch.equal(one[:, :-3], other[:, :-3])
    assert all(not torch.allclose(one[:, place], other[:, place]) for place in (-3, -2, -1))


def test_heads_share_keys_and_values():
    shared, own = (Attention(Sizes(1, 16, 4, kv, 24, 32)) for kv in (2, 4))
    query, key, value = shared.qkv.weight.unflatten(0, (8, 4)).split([4, 2, 2])
    twice = [query, key.repeat_interleave(2, 0), value.repeat_interleave(2, 0)]
    own.load_state_dict({**shared.state_dict(), "qkv.weight": torch.cat(twice).flatten(0, 1)})
    x = torch.randn(2, 8, 16)
    torch.testing.assert_close(shared(x), own(x))


def test_attention_residuals_do_what_the_published_pseudocode_does():
    model, (tokens, _) = made("attention-residuals"), batch("attention-residuals")

    def mixed(blocks, partial, part):
        values = torch.stack(blocks + [partial] * (partial is not None))
        weights = torch.einsum("d,nbtd->nbt", part.query, part.norm(values)).softmax(0)
        return torch.einsum("nbt,nbtd->btd", weights, values)

    blocks, partial = [], model.embedding(tokens)
    for place in range(6):
        layer = model.get_submodule(f"block{place}")
        h = mixed(blocks, partial, layer.before_attention)
        if place % 2 == 0:
            blocks, partial = [*blocks, partial], None
        out = layer.attention(h)
        partial = out if partial is None else partial + out
        partial = partial + layer.mlp(mixed(blocks, partial, layer.before_mlp))
    expected_logits = model.head.head(mixed(blocks, partial, model.head.mix))

    assert len(blocks) == 3
    torch.testing.assert_close(model(tokens), expected_logits)


def test_hyper_connections_begin_as_residuals():
    arguments, (tokens, _) = SMALL["hyper-connections"], batch("hyper-connections")
    torch.manual_seed(0)
    streams = MODELS["hyper-connections"].build(**arguments)
    plain = MODELS["decoder"].build(**{key: value for key, value in arguments.items() if key != "streams"})
    state = {"embedding.weight": streams.embedding.tokens.weight}
    for name, value in streams.state_dict().items():
        if ".inner." in name:
            state[name.replace(".0.inner", ".attention").replace(".1.inner", ".mlp")] = value
    plain.load_state_dict(state | {name: value for name, value in streams.state_dict().items() if "head" in name})
    torch.testing.assert_close(streams(tokens), plain(tokens), atol=1e-5, rtol=1e-4)


def by_hand(experts, x):
    """Outputs and loss of one sequence, token by token: all first choices, then all second ones."""
    mixture, x = experts.mixture, experts.norm(x)
    probabilities = experts.router(x).softmax(-1)
    weights, choices = probabilities.topk(mixture.chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    out, full, sent = torch.zeros_like(x), [0] * mixture.experts, [0] * mixture.experts
    for k in range(mixture.chosen):
        for token, expert in enumerate(choices[:, k].tolist()):
            sent[expert] += 1
            if full[expert] < mixture.capacity * mixture.chosen * len(x) / mixture.experts:
                full[expert] += 1
                gate, up = (x[token] @ experts.gate_up[expert]).chunk(2)
                out[token] += weights[token, k] * ((nn.functional.silu(gate) * up) @ experts.down[expert])
    share = torch.tensor(sent) / (len(x) * mixture.chosen)
    return out, mixture.experts * (share * probabilities.mean(0)).sum()


@pytest.mark.parametrize("capacity", [0.5, 1.0, 4.0])
def test_experts_take_tokens_until_they_are_full(capacity):
    torch.manual_seed(0)
    experts = Experts(Sizes(1, 16, 4, 2, 24, 32), Mixture(4, 2, capacity))
    x = torch.randn(3, 8, 16)
    found, balance = experts(x)
    for row, value, loss in zip(x, found, balance, strict=True):
        wanted, wanted_loss = by_hand(experts, row)
        torch.testing.assert_close(value, wanted)
        torch.testing.assert_close(loss, wanted_loss)


def test_the_loss_of_tokens_ahead_is_their_mean():
    tokens, target = batch("multi-token")
    found = made("multi-token")(tokens)
    assert (tokens.shape, target.shape, found.shape) == ((8, 10), (8, 10), (8, 3, 8, 32))
    each = [nn.functional.cross_entropy(found[:, k].flatten(0, 1), target[:, k : k + 8].flatten()) for k in range(3)]
    torch.testing.assert_close(MODELS["multi-token"].loss(found, target), each[0] + 0.3 * (each[1] + each[2]) / 2)


def test_a_module_ahead_sees_the_token_after_those_of_the_module_before():
    tokens, _ = batch("multi-token")
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 32
    one, other = made("multi-token")(tokens), made("multi-token")(changed)
    assert [torch.equal(one[:, k], other[:, k]) for k in range(3)] == [True, True, False]


def test_an_image_counts_once_gates_are_open():
    rows, _ = batch("captions")
    changed = rows.clone()
    changed[:, 0] = 255 - changed[:, 0]
    model = copy.deepcopy(made("captions"))
    assert not torch.allclose(model(rows), model(changed))
    for name, parameter in model.named_parameters():
        if name.endswith("gate"):
            nn.init.zeros_(parameter)
    assert torch.equal(model(rows), model(changed))


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        (
            "decoder",
            {"kv": 3},
            "heads must be a multiple of kv = 3: heads share keys and values, got 32; change either",
        ),
        (
            "decoder",
            {"D": 32},
            "D must give heads an even width: positions turn pairs of numbers, got 1; change D or heads",
        ),
        ("experts", {"chosen": 9}, "chosen must be at most experts = 8, got 9; lower it"),
        (
            "captions",
            {"size": 99},
            "size must be a multiple of patch = 14: patches cover the image, got 99; change either",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(name, arguments, problem):
    with pytest.raises(ConfigError) as caught:
        MODELS[name].check(arguments)
    assert caught.value.problems == (problem,)


# --- training in a pipeline -----------------------------------------------------------------------------------------


def order_of(schedule, n):
    if schedule is None:
        return None
    return named_schedule(schedule, m=CHUNKS, n=n, devices=n // 2 if schedule in DOUBLE else n)


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not different


@pytest.mark.parametrize(("name", "schedule", "checkpoint"), cover(ALL))
def test_gradients_are_those_of_the_plain_module_bit_by_bit(name, schedule, checkpoint):
    x, target = batch(name)
    cut = balance(name, 4)
    devices = ["cpu"] * (2 if schedule in DOUBLE else 4)
    pipe = GPipe(
        copy.deepcopy(made(name)), cut, devices=devices, chunks=CHUNKS, schedule=schedule, checkpoint=checkpoint
    )

    if schedule is None:
        MODELS[name].loss(pipe(x), target).backward()
    else:
        pipe.step(x, target, MODELS[name].loss, reduction="mean")

    found = {key: parameter.grad for key, parameter in pipe.named_parameters()}
    assert_equal(found, expected(name, cut, order_of(schedule, 4)))


@pytest.mark.parametrize(("schedule", "checkpoint"), [(None, "always"), ("1f1b", "never"), ("zb_v", "except_last")])
def test_tied_weights_have_the_gradients_of_the_plain_module(schedule, checkpoint):
    torch.manual_seed(0)
    spec, (x, target) = MODELS["multi-token"], batch("multi-token")
    plain = spec.build(**{**SMALL["multi-token"], "tied": True}).double()
    devices = ["cpu"] * (2 if schedule in DOUBLE else 4)
    layers, cut = copy.deepcopy(plain), balance("multi-token", 4)
    pipe = GPipe(layers, cut, devices=devices, chunks=CHUNKS, schedule=schedule, checkpoint=checkpoint)

    spec.loss(plain(x), target).backward()
    if schedule is None:
        spec.loss(pipe(x), target).backward()
    else:
        pipe.step(x, target, spec.loss, reduction="mean")

    found, wanted = dict(pipe.named_parameters()), dict(plain.named_parameters())
    assert found.keys() == wanted.keys()
    assert "head.linear.weight" not in wanted
    for name, parameter in wanted.items():
        torch.testing.assert_close(found[name].grad, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


@every_model
def test_without_any_component_gradients_are_the_same(name):
    x, target = batch(name)
    cut = balance(name, 3)
    pipe = GPipe(
        copy.deepcopy(made(name)), cut, devices=["cpu"] * 3, chunks=CHUNKS, components=Components.from_label("baseline")
    )

    MODELS[name].loss(pipe(x), target).backward()

    assert_equal({key: parameter.grad for key, parameter in pipe.named_parameters()}, expected(name, cut, None))


def trained(_, combinations):
    """Gradients of this process's part of each model."""
    found = []
    for name, schedule, checkpoint in combinations:
        x, target = batch(name)
        cut = balance(name, 4 if schedule in DOUBLE else 2)
        pipe = Pipe(copy.deepcopy(made(name)), cut, schedule=schedule, chunks=CHUNKS, checkpoint=checkpoint)
        pipe.step(x, target, MODELS[name].loss, reduction="mean")
        found.append({key: parameter.grad for key, parameter in pipe.named_parameters()})
        pipe.close()
    return found


def test_gradients_of_two_processes_are_those_of_the_plain_module_bit_by_bit(tmp_path):
    combinations = cover(product(SMALL, ("1f1b", "zb_h1", "interleaved", "zb_v"), MODES))

    first, second = run_processes(2, tmp_path, trained, combinations)

    for (name, schedule, _), one, other in zip(combinations, first, second, strict=True):
        n = 4 if schedule in DOUBLE else 2
        assert not one.keys() & other.keys()
        assert_equal(one | other, expected(name, balance(name, n), order_of(schedule, n)))
