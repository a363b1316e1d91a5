"""Models drawn at random: what their tensors hold, in the simulation and in the engine on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from gpipe_bench import Components
from tests.engine.support import MODES
from tests.simulator.live import live_peaks
from tests.simulator.support import examples
from tests.simulator.test_live_models import Residual

WIDTH, LENGTH = 64, 3
SAMPLES = (4, 88)
"""Of a micro-batch, whose tensors then have 3 KiB or 66 KiB."""


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.left(x) * torch.sigmoid(self.right(x))


class Halves(nn.Module):
    """Views of one tensor, put together anew."""

    def forward(self, x):
        left, right = x.chunk(2, -1)
        return torch.cat([left * right, left + right], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        queries, keys, values = self.queries(x).chunk(3, -1)
        return torch.softmax(queries @ keys.transpose(1, 2), -1) @ values


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factors = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.factors


def linear():
    return nn.Linear(WIDTH, WIDTH)


LAYERS = {
    "linear": linear,
    "relu": nn.ReLU,
    # What a linear layer makes of three dimensions is a view, and to write to one costs the backward pass two copies.
    "relu_": lambda: nn.ReLU(inplace=True),
    "hardtanh_": lambda: nn.Hardtanh(inplace=True),
    "silu_": lambda: nn.SiLU(inplace=True),
    "dropout_": lambda: nn.Dropout(0.1, inplace=True),
    # It hands a view on.
    "identity": nn.Identity,
    # It makes one.
    "flatten": lambda: nn.Sequential(nn.Unflatten(-1, (8, -1)), nn.Flatten(-2)),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "softmax": lambda: nn.Softmax(-1),
    "residual": Residual,
    "gate": Gate,
    "halves": Halves,
    "attention": Attention,
    "scale": Scale,
    "feed forward": lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
}


@st.composite
def models(draw, least=2):
    """(names of layers after the first one, balance, micro-batches, samples of each)."""
    names = draw(st.lists(st.sampled_from([*LAYERS]), min_size=2, max_size=8))
    ends = sorted(draw(st.sets(st.integers(1, len(names)), max_size=3)))
    balance = [stop - start for start, stop in zip([0, *ends], [*ends, len(names) + 1], strict=True)]
    return names, balance, draw(st.integers(least, 4)), draw(st.sampled_from(SAMPLES))


@pytest.mark.parametrize("tokens", [False, True], ids=["numbers", "tokens"])
@pytest.mark.parametrize("checkpoint", MODES)
@examples(25)
@given(
    model=models(),
    components=st.sampled_from(list(Components.factorial())),
    schedule=st.sampled_from([None, "gpipe", "1f1b", "zb_h1"]),
)
# A layer that writes to a view: the last one of a partition, behind a layer that makes the view of what enters, and
# before one that waits for W.
@example(model=(["feed forward", "relu_"], [1, 2], 2, 88), components=Components(), schedule="zb_h1")
@example(model=(["flatten", "relu_"], [1, 2], 2, 88), components=Components(), schedule=None)
@example(model=(["linear", "silu_", "linear"], [1, 3], 2, 88), components=Components(), schedule="zb_h1")
def test_the_peak_is_that_of_the_engine(model, components, schedule, checkpoint, tokens):
    names, balance, m, samples = model
    if checkpoint == "never":
        # With more, the counter would show itself: autograd adds gradients in place, but not while it is watched.
        m = 2
    try:
        layers = nn.Sequential(nn.Embedding(4, WIDTH) if tokens else linear(), *(LAYERS[name]() for name in names))
        batch = torch.zeros(samples * m, LENGTH, dtype=torch.long) if tokens else torch.ones(samples * m, LENGTH, WIDTH)
        layers(batch).sum().backward()
    except RuntimeError as error:
        # What a layer keeps is written to by the next one: no plain module either.
        assert "inplace operation" in str(error)  # noqa: PT017 - anything else is a failure
        return
    layers.zero_grad(set_to_none=True)
    options = {"checkpoint": checkpoint, "components": components, "schedule": schedule}
    real, simulated = live_peaks(layers, batch, balance, m=m, **options)

    assert simulated == pytest.approx(real, rel=0.01)
