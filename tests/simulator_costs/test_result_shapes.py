"""Shapes that are plain to see are those that PyTorch gives; where they are not, nothing is said."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from gpipe_bench.simulator.tracing.meta_results import evaluate, operation_key
from gpipe_bench.simulator.tracing.recorder import Recorder
from gpipe_bench.simulator.tracing.result_shapes import gives_first, plain_result
from gpipe_bench.simulator.tracing.shapes import Shape

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
            (aten.sigmoid.default, (x,)),
            (aten.sqrt.default, (x,)),
            (aten.leaky_relu.default, (x, 0.1)),
            (aten.add.Tensor, (x, other)),
            (aten.div.Scalar, (x, 3)),
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
    return random.choice((aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor)), tuple(turned)


def call_of_cat(random: Random):
    shape, dtype = random.choices(LENGTHS, k=random.randrange(1, 6)), random.choice(TYPES)
    dim = random.randrange(-len(shape), len(shape))
    parts = []
    for _ in range(random.randrange(1, 4)):
        shape[dim] = random.choice((0, 1, 2, 3))
        parts.append(some_tensor(random, shape, random.choice((dtype, dtype, dtype, torch.float32))))
    return aten.cat.default, (parts, dim) if dim or random.random() < 0.5 else (parts,)


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


def call_of_convolution(random: Random):
    axes, dtype = random.choice((1, 2, 3)), random.choice(TYPES[:4])
    groups, size = random.choice((1, 1, 2)), random.choice((1, 1, 2, 3))
    inside, outside = (groups * random.choice((1, 2)) for _ in range(2))
    x = some_tensor(random, [random.choice(LENGTHS[1:]), inside, *random.choices((1, 3, 4, 5), k=axes)], dtype)
    weight = some_tensor(random, [outside, inside // groups, *[size] * axes], dtype)
    bias = torch.empty(outside, dtype=dtype, device="meta") if random.random() < 0.5 else None
    stride, padding, dilation = ([random.choice(values)] * axes for values in ((1, 2), (0, 1), (1, 1, 2)))
    how = (stride, padding, dilation, random.random() < 0.1, [0] * axes, groups)
    if random.random() < 0.5:
        return aten.convolution.default, (x, weight, bias, *how)
    found = whatever(aten.convolution.default, (x, weight, bias, *how))
    if found is None:
        return aten.convolution.default, (x, weight, bias, *how)
    grad = some_tensor(random, list(found.shape), dtype)
    mask = [random.random() < 0.8, random.random() < 0.8, bias is not None]
    return aten.convolution_backward.default, (grad, x, weight, None if bias is None else [outside], *how, mask)


def call_of_images(random: Random):
    dtype, sizes = random.choice(TYPES[:4]), [random.choice((0, 1, 1, 2, 2, 3, 3)) for _ in range(2)]
    images = random.choices(LENGTHS[1:], k=2)
    x = some_tensor(random, [*images, *random.choices((1, 3, 4, 5), k=2)][-random.choice((3, 4, 4, 4)) :], dtype)
    ranges = (1, 1, 1, 2, 2, 0), (0, 0, 0, 1, 1, -1)
    stride, padding = ([random.choice(values) for _ in range(2)] for values in ranges)
    dilation, larger = random.choice(([1, 1], [1, 1], [2, 1], [0, 1])), random.random() < 0.1
    divisor = random.choice((None, None, 2, 0))
    ways = {
        aten.avg_pool2d: random.choice(((), (stride,), (stride, padding, larger, False, divisor))),
        aten.max_pool2d_with_indices: random.choice(((), (stride,), (stride, padding, dilation, larger))),
        aten.upsample_nearest2d: (2.0, None),
    }
    func, how = random.choice([*ways.items()])
    if random.random() < 0.5:
        return func.default, (x, sizes, *how)
    found = whatever(func.default, (x, sizes, *how))
    if found is None or x.dim() < 4:
        return func.default, (x, sizes, *how)
    first = found if isinstance(found, Shape) else found[0]
    grad = some_tensor(random, list(first.shape), random.choice((dtype, dtype, TYPES[0])))
    if func is aten.upsample_nearest2d:
        return aten.upsample_nearest2d_backward.default, (grad, sizes, list(x.shape), *how)
    if func is aten.avg_pool2d:
        return aten.avg_pool2d_backward.default, (grad, x, sizes, stride, padding, larger, False, None)
    places = torch.empty(first.shape if random.random() < 0.9 else (1, 2), dtype=torch.int64, device="meta")
    return aten.max_pool2d_with_indices_backward.default, (grad, x, sizes, stride, padding, [1, 1], larger, places)


def call_of_part(random: Random):
    shape = random.choices(LENGTHS, k=random.randrange(1, 4))
    dim = random.randrange(len(shape))
    part = [1 if place == dim else length for place, length in enumerate(shape)]
    grad = some_tensor(random, part, random.choice(TYPES))
    return aten.slice_backward.default, (grad, shape, dim, 0, 1, 1)


def call_of_reduction(random: Random):
    shape = random.choices(LENGTHS[1:], k=random.randrange(1, 5))
    dims = random.sample(range(-len(shape), len(shape)), random.choice((1, 1, 2)))
    x = some_tensor(random, shape, random.choice(TYPES))
    return random.choice((aten.sum.dim_IntList, aten.mean.dim)), (x, dims, *random.choice(((), (True,), (False,))))


def call_of_product(random: Random):
    lengths, dtype = random.choices(LENGTHS, k=3), random.choice(TYPES[:5])
    x, y = some_tensor(random, lengths[:2], dtype), some_tensor(random, lengths[1:], random.choice((dtype, *TYPES[:1])))
    if random.random() < 0.1:
        y = y.t()
    if random.random() < 0.5:
        return aten.mm.default, (x, y)
    added = some_tensor(random, random.choice((lengths[2:], lengths[::2], [1], lengths[1:2])), dtype)
    return aten.addmm.default, (added, x, y)


def call_of_classes(random: Random):
    shape, dtype = random.choices(LENGTHS, k=random.choice((1, 2, 2, 2))), random.choice(TYPES[:5])
    x, y = (some_tensor(random, shape, random.choice((dtype, dtype, TYPES[0]))) for _ in range(2))
    kind = random.choice((torch.int64, torch.int64, torch.float32))
    target = torch.empty(shape[:-1] if random.random() < 0.9 else [2], dtype=kind, device="meta")
    weight = None if random.random() < 0.8 else torch.empty(shape[-1], dtype=dtype, device="meta")
    how = target, weight, random.randrange(3), -100
    number = torch.empty((), dtype=dtype, device="meta")
    dim = random.randrange(-1, 2)
    return random.choice(
        [
            (aten._log_softmax.default, (x, dim, random.random() < 0.2)),
            (aten._log_softmax_backward_data.default, (x, y, dim, random.choice((dtype, dtype, TYPES[0])))),
            (aten.nll_loss_forward.default, (x, *how)),
            (aten.nll_loss_backward.default, (number, x, *how, number)),
        ]
    )


def call_of_entropy(random: Random):
    shape, dtype = random.choices(LENGTHS, k=random.randrange(4)), random.choice(TYPES[:5])
    x, target = some_tensor(random, shape, dtype), some_tensor(random, shape, random.choice((dtype, dtype, TYPES[0])))
    more = [random.choice((None, None, None, x)), None, random.randrange(3)][: random.randrange(4)]
    return aten.binary_cross_entropy_with_logits.default, (x, target, *more)


def shape_of(value):
    if isinstance(value, Tensor):
        return Shape(tuple(value.shape), value.stride(), value.dtype)
    return tuple(map(shape_of, value)) if isinstance(value, tuple | list) else value


def whatever(func, args):
    """What PyTorch gives; None if it raises."""
    try:
        return shape_of(func(*args))
    except (RuntimeError, IndexError, ZeroDivisionError):
        return None


@pytest.mark.parametrize(
    "call",
    [
        call_of_elements,
        call_of_two,
        call_of_cat,
        call_of_convolution,
        call_of_images,
        call_of_part,
        call_of_reduction,
        call_of_product,
        call_of_batch_norm,
        call_of_classes,
        call_of_entropy,
    ],
)
def test_they_are_those_of_pytorch(call):
    known = 0
    for seed in range(CASES):
        func, args = call(Random(seed))
        found = plain_result(func, args, {})
        if found is not None:
            known += 1
            assert found == whatever(func, args), (seed, func, args)
    assert CASES // 10 < known < CASES


def test_what_writes_to_its_first_operand_gives_it():
    known = 0
    for seed in range(CASES):
        random = Random(seed)
        _, (x, y) = call_of_two(random)
        other = y if isinstance(y, Tensor) else x
        func, args, kwargs = random.choice(
            [
                (aten.add_.Tensor, (x, y), {}),
                (aten.add_.Tensor, (x, y), {"alpha": random.choice((2, 0.5))}),
                (aten.mul_.Tensor, (x, y), {}),
                (aten.sub_.Tensor, (x, y), {}),
                (aten.div_.Scalar, (x, 0.5), {}),
                (aten.addcmul_.default, (x, x, other), {}),
                (aten.addcdiv_.default, (x, x, other), {"value": 0.5}),
            ]
        )
        if gives_first(func, args, kwargs):
            known += 1
            assert func(*args, **kwargs) is x
    assert CASES // 10 < known < CASES


@pytest.mark.parametrize("func", [aten.empty_like.default, aten.ones_like.default, aten.zeros_like.default])
@pytest.mark.parametrize("how", [{}, {"pin_memory": False}, {"memory_format": torch.channels_last}])
def test_one_like_another_is_that_of_pytorch(func, how):
    for x in torch.empty(2, 3, 4, 5, device="meta"), torch.empty(2, 4, 5, 3, device="meta").permute(0, 3, 1, 2):
        found = plain_result(func, (x,), how)
        assert found in {None, shape_of(func(x, **how))}
    assert plain_result(aten.zeros_like.default, (torch.empty(2, device="meta"),), {}) == Shape((2,), (1,), torch.float)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float16])
@pytest.mark.parametrize("number", [1, 0.5, True])
def test_numbers_that_do_not_fit_are_left_to_pytorch(number, dtype):
    x = torch.empty(2, dtype=dtype, device="meta")
    if gives_first(aten.add_.Tensor, (x, number), {}):
        assert x.add_(number) is x


@pytest.mark.parametrize("other", [1, torch.tensor(1.0), torch.tensor(1.0, device="meta")])
def test_values_that_are_there_are_changed(other):
    """Optimizers count their steps on the CPU."""
    x, sparse = torch.zeros(()), torch.sparse_coo_tensor(size=(2,), device="meta", check_invariants=False)
    meant = not isinstance(other, torch.Tensor) or not other.is_meta
    assert not gives_first(aten.add_.Tensor, (x, other), {})
    assert not gives_first(aten.add_.Tensor, (sparse, other), {})
    if meant:
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
        evaluate(aten.mm.default, (x, x), {}, operation_key(aten.mm.default, (x, x), {}))
    fits = x, x.t()
    assert evaluate(aten.mm.default, fits, {}, operation_key(aten.mm.default, fits, {})).shape == (2, 2)


def test_one_channel_keeps_the_order_of_its_gradient():
    x = torch.empty(3, 1, 2, 1, device="meta")
    grad, stats = torch.empty_strided((3, 1, 2, 1), (2, 1, 1, 1), device="meta"), torch.empty(1, device="meta")
    args = grad, x, None, None, None, stats, stats, True, 1e-5, [True, False, False]
    found = plain_result(aten.native_batch_norm_backward.default, args, {})
    assert found is None or found == shape_of(aten.native_batch_norm_backward.default(*args))


def test_tensors_that_do_not_fit_are_not_put_together():
    of = [torch.empty(2, 3, device="meta"), torch.empty(2, 4, device="meta")]
    assert plain_result(aten.cat.default, (of, 0), {}) is None
    assert plain_result(aten.cat.default, (of, 2), {}) is None
    assert plain_result(aten.cat.default, (of, 1), {}).shape == (2, 7)
