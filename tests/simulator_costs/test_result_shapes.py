"""Shapes that are plain to see are those that PyTorch gives; where they are not, nothing is said."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from gpipe_bench.simulator.tracing.meta_results import evaluate, plain_result
from gpipe_bench.simulator.tracing.recorder import Recorder
from gpipe_bench.simulator.tracing.specs import TensorSpec

aten = torch.ops.aten
CASES = 400
LENGTHS = (0, 1, 1, 2, 3)
TYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.float16, torch.int64)


def some_tensor(random: Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """One of a shape: contiguous, a part of another, permuted, or expanded."""
    way = random.randrange(5)
    if way == 0:
        larger = torch.empty([length + random.randrange(2) for length in shape], dtype=dtype, device="meta")
        return larger[tuple(slice(size - length, size) for size, length in zip(larger.shape, shape, strict=True))]
    if way == 1:
        order = random.sample(range(len(shape)), len(shape))
        stored = torch.empty([shape[place] for place in order], dtype=dtype, device="meta")
        return stored.permute([order.index(place) for place in range(len(shape))])
    if way == 2:
        return torch.empty([random.choice((1, length)) for length in shape], dtype=dtype, device="meta").expand(shape)
    return torch.empty(shape, dtype=dtype, device="meta")


def call_of_elements(random: Random):
    shape = random.choices(LENGTHS, k=random.randrange(5))
    dtype = random.choice(TYPES[:5])
    x, y = some_tensor(random, shape, dtype), some_tensor(random, shape, dtype)
    other = some_tensor(random, shape[random.randrange(2) :], random.choice(TYPES))
    return random.choice(
        [
            (aten.relu.default, (x,)),
            (aten.leaky_relu.default, (x, 0.1)),
            (aten.add.Tensor, (x, other)),
            (aten.threshold_backward.default, (x, y, 0)),
            (aten.leaky_relu_backward.default, (x, y, 0.1, False)),
        ]
    )


def call_of_two(random: Random):
    """Operands of which one may repeat itself."""
    shape, dtype = random.choices(LENGTHS, k=random.randrange(6)), random.choice(TYPES)
    other = some_tensor(random, [random.choice((1, length)) for length in shape], random.choice((dtype, *TYPES)))
    if random.random() < 0.2:
        other = torch.empty((), dtype=other.dtype, device="meta")
    pair = [some_tensor(random, shape, dtype), random.choice((other, other, other, 2, 0.5, True))]
    turned = pair[::-1] if isinstance(pair[1], Tensor) and random.random() < 0.5 else pair
    return random.choice((aten.add.Tensor, aten.mul.Tensor)), tuple(turned)


def call_of_batch_norm(random: Random):
    # An empty batch, and a single value, make PyTorch divide by zero.
    shape = [random.choice((2, 3)), *random.choices((1, 2, 3), k=random.randrange(1, 4))]
    dtype = random.choice(TYPES[:5])
    x, training = some_tensor(random, shape, dtype), random.random() < 0.8
    weight, bias, saved = (torch.empty(shape[1], dtype=dtype, device="meta") for _ in range(3))
    weight, bias = (value if random.random() < 0.8 else None for value in (weight, bias))
    running = [torch.empty(shape[1], device="meta") for _ in range(2)]
    if random.random() < 0.5:
        return aten.native_batch_norm.default, (x, weight, bias, *running, training, 0.1, 1e-5)
    wanted = [random.random() < 0.9 for _ in range(3)]
    grad = some_tensor(random, shape, dtype)
    return aten.native_batch_norm_backward.default, (grad, x, weight, *running, saved, saved, training, 1e-5, wanted)


def shape_of(value):
    if isinstance(value, Tensor):
        return TensorSpec.of(value)
    return tuple(map(shape_of, value)) if isinstance(value, tuple | list) else value


def whatever(func, args):
    """What PyTorch gives; None if it raises."""
    try:
        return shape_of(func(*args))
    except (RuntimeError, IndexError, ZeroDivisionError):
        return None


@pytest.mark.parametrize("call", [call_of_elements, call_of_two, call_of_batch_norm])
def test_they_are_those_of_pytorch(call):
    known = 0
    for seed in range(CASES):
        func, args = call(Random(seed))
        found = plain_result(func, args, {})
        if found is not None:
            known += 1
            assert found == whatever(func, args), (seed, func, args)
    assert CASES // 10 < known < CASES


@pytest.mark.parametrize("other", [1, torch.tensor(1.0)])
def test_values_that_are_there_are_changed(other):
    """Optimizers count their steps on the CPU."""
    x = torch.zeros(())
    with Recorder():
        x.add_(other)
    assert x.item() == 1


def test_what_is_written_counts_as_written():
    x = torch.empty(2, device="meta")
    with Recorder():
        x.add_(x)
        x.mul_(2)
    assert x._version == 2


def test_a_single_value_has_no_variance():
    x, stats = torch.empty(1, 3, device="meta"), torch.empty(3, device="meta")
    assert plain_result(aten.native_batch_norm.default, (x, stats, stats, stats, stats, True, 0.1, 1e-5), {}) is None


def test_an_error_is_that_of_the_operation():
    x = torch.empty(2, 3, device="meta")
    with pytest.raises(RuntimeError, match="dim"):
        evaluate(aten.mm.default, (x, x), {})
    fits = x, x.t()
    assert evaluate(aten.mm.default, fits, {}).shape == (2, 2)


def test_one_channel_keeps_the_order_of_its_gradient():
    x = torch.empty(3, 1, 2, 1, device="meta")
    grad, stats = torch.empty_strided((3, 1, 2, 1), (2, 1, 1, 1), device="meta"), torch.empty(1, device="meta")
    args = grad, x, None, None, None, stats, stats, True, 1e-5, [True, False, False]
    found = plain_result(aten.native_batch_norm_backward.default, args, {})
    assert found is None or found == shape_of(aten.native_batch_norm_backward.default(*args))
