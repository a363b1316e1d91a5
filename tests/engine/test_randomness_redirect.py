"""Every random operator of PyTorch can be made to draw from a task's own generators."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench.engine.randomness import Redirect

OPERATORS = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "dropout2d": lambda x: functional.dropout2d(x.view(1, 8, 8, 1), 0.5),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "feature_alpha_dropout": lambda x: nn.FeatureAlphaDropout(0.5)(x.view(1, 8, 8, 1)),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "rrelu": lambda x: functional.rrelu(-x, training=True),
    "gumbel_softmax": functional.gumbel_softmax,
    "fractional_max_pool": lambda x: functional.fractional_max_pool2d(
        torch.arange(3600.0).view(1, 1, 60, 60), 3, output_size=13
    ),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "lstm": lambda x: nn.LSTM(8, 4, num_layers=2, dropout=0.5)(x.view(1, 8, 8))[0],
    "rand": lambda x: torch.rand(9),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(1000, (9,)),
    "randperm": lambda x: torch.randperm(50),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "bernoulli_": lambda x: torch.empty(64).bernoulli_(0.5),
    "multinomial": lambda x: torch.multinomial(x, 6),
    "normal": lambda x: torch.normal(x, 1.0),
    "poisson": lambda x: torch.poisson(x * 40),
    "exponential_": lambda x: torch.empty(9).exponential_(),
    "uniform_": lambda x: torch.empty(9).uniform_(),
    "random_": lambda x: torch.empty(9).random_(),
    "init": lambda x: nn.init.kaiming_uniform_(torch.empty(4, 4)),
}
X = torch.ones(8, 8)


def drawn(name: str, seed: int):
    with Redirect(seed) as redirect:
        values = OPERATORS[name](X)
    assert redirect.drew
    return values.detach()


@pytest.mark.parametrize("name", OPERATORS)
def test_a_seed_alone_says_what_is_drawn(name):
    """Whatever the default generator does, which is left alone."""
    first = drawn(name, 5)
    torch.rand(3)
    before = torch.get_rng_state()
    assert torch.equal(first, drawn(name, 5))
    assert not torch.equal(first, drawn(name, 6))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["rand", "native_dropout"])
def test_a_second_draw_goes_on_where_the_first_stopped(name):
    with Redirect(5):
        first, second = OPERATORS[name](X), OPERATORS[name](X)
    assert not torch.equal(first, second)


def test_a_generator_that_the_caller_gives_is_used():
    own = torch.Generator().manual_seed(3)
    with Redirect(5):
        found = torch.rand(4, generator=own)
    assert torch.equal(found, torch.rand(4, generator=torch.Generator().manual_seed(3)))


def test_operators_that_draw_nothing_are_not_counted():
    with Redirect(5) as redirect:
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5).eval())(X)
    # the layer's initialisation above draws; a fresh one does not
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5).eval())
    with Redirect(5) as quiet:
        layers(X)
    assert (redirect.drew, quiet.drew) == (True, False)


def test_other_threads_draw_as_ever():
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    found = []
    with Redirect(5):
        thread = threading.Thread(target=lambda: found.append(torch.rand(4)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)


def test_gradients_pass_through_redirected_operators():
    x = X.clone().requires_grad_()
    with Redirect(5):
        y = functional.dropout(x, 0.5)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def test_draws_of_a_kept_device_type_are_as_ever():
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    with Redirect(5, keep="cpu") as redirect:
        assert torch.equal(torch.rand(4), expected)
    assert not redirect.drew
