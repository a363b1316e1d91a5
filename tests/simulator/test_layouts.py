"""Which gradients leaves copy: what the simulator says of their layouts, beside what autograd does."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.kernels.specs import TensorSpec


@st.composite
def layouts(draw, shape):
    """A tensor of ``shape``: its dimensions in any order, each a part of a larger one, in steps or expanded."""
    order = draw(st.permutations(range(len(shape))))
    kinds = [draw(st.sampled_from(["whole", "whole", "part", "steps", "expanded"])) for _ in shape]
    within = {"whole": 1, "part": 1, "steps": 2, "expanded": 1}
    more = {"whole": 0, "part": 1, "steps": 0, "expanded": 0}
    sizes = [
        1 if kind == "expanded" else length * within[kind] + more[kind]
        for length, kind in zip(shape, kinds, strict=True)
    ]
    base = torch.zeros([sizes[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    for dim, (length, kind) in enumerate(zip(shape, kinds, strict=True)):
        base = base[(slice(None),) * dim + (slice(None, None, 2) if kind == "steps" else slice(0, length),)]
    # Also of one element: expand() would leave its stride.
    strides = [0 if kind == "expanded" else stride for stride, kind in zip(base.stride(), kinds, strict=True)]
    return base.as_strided(shape, strides)


@st.composite
def pairs(draw):
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    return draw(layouts(shape)), draw(layouts(shape))


def taken_as_it_is(leaf, gradient):
    """Whether autograd makes ``gradient``, which nobody else holds, the gradient of ``leaf``."""

    class Give(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, _):
            return given.pop()

    given, place = [gradient.as_strided(gradient.shape, gradient.stride())], gradient.data_ptr()
    Give.apply(leaf.requires_grad_()).backward()
    return leaf.grad.data_ptr() == place


@given(pairs())
@settings(max_examples=300)
def test_a_leaf_takes_what_fits(pair):
    leaf, gradient = pair

    assert TensorSpec.of(leaf).fits(gradient) == taken_as_it_is(leaf.detach(), gradient)
