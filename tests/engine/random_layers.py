"""Layers whose code has side effects, random models of them, and a ledger of all that their code saw.

All numbers are whole and small: weights are -1, 0, 1 or 2, masks -1 or 1. So float64 holds every sum exactly in
whatever order it is added up, and a pipeline equals the plain module bit for bit.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from gpipe_bench import is_recomputing
from gpipe_bench.skip import Namespace, peek, pop, skippable, stash

WIDTH = 4


# --- what the code of layers saw ---------------------------------------------------------------------------------


def numbers(value: Tensor | None) -> Any:
    # A copy waits for a collective that has not ended yet.
    return None if value is None else tuple(value.detach().clone().flatten().tolist())


class Ledger:
    """What the code of layers saw, and how often; and the masks that they drew.

    A micro-batch is told from another by its numbers.

    Args:
        masks: those of another ledger, to be used here in place of new ones.

    Attributes:
        step: the training step, to be set by whoever trains.
        masks: for each step, layer and input what the layer drew.
    """

    def __init__(self, masks: dict[Any, Any] | None = None) -> None:
        self.step = 0
        self.masks: dict[Any, Any] = {} if masks is None else masks
        self._replays = masks is not None
        self._seen: list[tuple[Any, ...]] = []
        self._again: list[tuple[Any, ...]] = []

    def note(self, layer: str, event: str, *values: Tensor | None) -> None:
        """Note an event; what happens while a recomputation runs is kept apart."""
        (self._again if is_recomputing() else self._seen).append((self.step, layer, event, *map(numbers, values)))

    def mask(self, layer: str, x: Tensor, draw: Callable[[], Tensor]) -> Tensor:
        """A mask from ``draw``, or the one that the other ledger has for this input."""
        key = self.step, layer, numbers(x)
        if self._replays:
            return torch.tensor(self.masks[key], dtype=x.dtype).view_as(x)
        drawn = draw()
        if not is_recomputing():
            assert self.masks.setdefault(key, numbers(drawn)) == numbers(drawn), "two equal micro-batches"
        return drawn

    def add(self, other: Ledger) -> None:
        """Add what another ledger has."""
        self.masks |= other.masks
        self._seen += other._seen
        self._again += other._again

    def events(self, *, parameters: bool) -> Counter[tuple[Any, ...]]:
        """How often each event was seen: those of parameters, or all others."""
        return Counter(event for event in self._seen if event[2].startswith("parameter") is parameters)

    def forwards(self, *, again: bool) -> Counter[tuple[Any, ...]]:
        """How often each layer ran on each input, in first passes or in recomputations."""
        return Counter(event for event in (self._again if again else self._seen) if event[2] == "forward")


# --- layers ----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """(rows, 4) -> (rows, 4), or a tuple of which the next layer takes the first value alone."""

    def __init__(self, name: str, ledger: Ledger, draw: random.Random, rows: int) -> None:
        super().__init__()
        self.name, self.ledger = name, ledger
        self.make(draw, rows)

    def make(self, draw: random.Random, rows: int) -> None:
        """Make weights."""
        self.w, self.v = factors(), factors()

    def forward(self, values: Any) -> Any:
        x = first(values)
        self.note("forward", x)
        return self.run(x)

    def run(self, x: Tensor) -> Any:
        raise TypeError("a layer must have a value, got none; define value()")

    def note(self, event: str, *values: Tensor | None) -> None:
        self.ledger.note(self.name, event, *values)

    def noting(self, event: str, factor: int = 1) -> Callable[[Tensor], Tensor | None]:
        """A hook that notes a gradient, and multiplies it."""

        def hook(grad: Tensor) -> Tensor | None:
            self.note(event, grad)
            return None if factor == 1 else grad * factor

        return hook


def factors(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.tensor([-1.0, 1.0, 2.0])[torch.randint(3, (*shape, WIDTH))].double())


def mixing() -> Tensor:
    """A matrix of -1, 0 and 1 that loses nothing: its determinant is 1 or -1."""
    matrix = torch.randint(-1, 2, (WIDTH, WIDTH)).triu(1) + torch.eye(WIDTH)
    return matrix[torch.randperm(WIDTH)].double()


def small(x: Tensor) -> Tensor:
    """x - 16 k, between -8 and 8."""
    return x - (x.detach() / 16).round() * 16


def first(values: Any) -> Tensor:
    """What a layer takes of that which it is given."""
    return values[0] if isinstance(values, tuple) else values


def hooked(x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    if x.requires_grad:
        x.register_hook(hook)
    return x


class Linear(Layer):
    """What stands between the others."""

    def make(self, draw: random.Random, rows: int) -> None:
        self.w, self.bend = nn.Parameter(mixing()), draw.random() < 0.5
        self.b = factors(1) if draw.random() < 0.5 else None

    def run(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(small(x), self.w, None if self.b is None else self.b[0])
        return torch.where(y > 0, y, 2 * y) if self.bend else y


class Add(Layer):
    """x + b, which gives both of them one and the same gradient."""

    def make(self, draw: random.Random, rows: int) -> None:
        self.b = factors(rows)

    def run(self, x: Tensor) -> Tensor:
        return x + self.b


# --- custom functions ------------------------------------------------------------------------------------------------


class Times(Function):
    """x w. Those below differ in what they keep, and in what else they do."""

    @staticmethod
    def forward(ctx: Any, note: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.note = note
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note("backward", grad)
        x, w = ctx.saved_tensors
        return None, grad * w, (grad * x).sum(0)


class TimesInPlace(Times):
    """Writes the gradient of x over its own, as Liger's RMSNorm does."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note("backward", grad)
        x, w = ctx.saved_tensors
        of_weight = (grad * x).sum(0)
        return None, grad.mul_(w), of_weight


class TimesFused(Times):
    """Adds to ``w.main_grad`` itself, as Megatron and Transformer Engine do; gives None for w, or zeros."""

    @staticmethod
    def forward(ctx: Any, note: Any, x: Tensor, w: Tensor, gives: bool) -> Tensor:
        ctx.gives = gives
        return Times.forward(ctx, note, x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note("backward", grad)
        x, w = ctx.saved_tensors
        w.main_grad += (grad * x).sum(0)
        return None, grad * w, w.new_zeros(1).expand_as(w) if ctx.gives else None, None


class TimesFreeing(Times):
    """Frees what it kept."""

    @staticmethod
    def forward(ctx: Any, note: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.note, ctx.kept = note, (x.detach(), w.detach())
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note("backward", grad)
        (x, w), ctx.kept = ctx.kept, None
        return None, grad * w, (grad * x).sum(0)


class TimesOnView(TimesFreeing):
    """Writes to its input, which may be a view: autograd then hides its node in one for the whole tensor."""

    @staticmethod
    def forward(ctx: Any, note: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.note, ctx.kept = note, (x.detach().clone(), w.detach())
        ctx.mark_dirty(x)
        return x.mul_(w)


class TimesTagged(Times):
    """x w times an attribute of a tensor, which it finds again at the saved tensor."""

    @staticmethod
    def forward(ctx: Any, note: Any, x: Tensor, w: Tensor, tagged: Any) -> Tensor:
        ctx.save_for_backward(x, w, tagged)
        ctx.note = note
        return x * w * tagged.sign_of_it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note("backward", grad)
        x, w, tagged = ctx.saved_tensors
        signed = grad * tagged.sign_of_it
        return None, signed * w, (signed * x).sum(0), None


class TimesScaling(Times):
    """Multiplies the gradient that its forward pass made, in place, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, note: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w.detach().expand_as(x).clone(), x.detach().clone())
        ctx.note = note
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note("backward", grad)
        of_x, of_w = ctx.saved_tensors
        return None, of_x.mul_(grad), of_w.mul_(grad).sum(0)


class TimesOnce(Times):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Times.backward(ctx, grad)


class TimesAsked(Times):
    """Computes what is asked for, and notes it."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note(f"backward for {ctx.needs_input_grad[1:]}", grad)
        x, w = ctx.saved_tensors
        _, of_x, of_w = ctx.needs_input_grad
        return None, grad * w if of_x else None, (grad * x).sum(0) if of_w else None


class Twice(Function):
    """x -> (x w, x v); a gradient that does not exist is None, or zeros."""

    @staticmethod
    def forward(ctx: Any, note: Any, x: Tensor, w: Tensor, v: Tensor, zeros: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(zeros)
        ctx.save_for_backward(x, w, v)
        ctx.note = note
        return x * w, x * v

    @staticmethod
    def backward(ctx: Any, one: Tensor | None, other: Tensor | None) -> Any:
        ctx.note("backward", one, other)
        x, w, v = ctx.saved_tensors
        of_x = sum(grad * each for grad, each in ((one, w), (other, v)) if grad is not None)
        of_w, of_v = (None if grad is None else (grad * x).sum(0) for grad in (one, other))
        return None, of_x, of_w, of_v, None


class Plus(Function):
    """x + b, whose gradient goes to both as it is."""

    @staticmethod
    def forward(ctx: Any, note: Any, x: Tensor, b: Tensor) -> Tensor:
        ctx.note = note
        return x + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note("backward", grad)
        return None, grad, grad


class Minus(Function):
    """-x, in place in both passes."""

    @staticmethod
    def forward(ctx: Any, note: Any, x: Tensor) -> Tensor:
        ctx.note = note
        ctx.mark_dirty(x)
        return x.neg_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note("backward", grad)
        return None, grad.neg_()


class Rounded(Function):
    """A weight as it is stored; in backward its gradient in place."""

    @staticmethod
    def forward(ctx: Any, note: Any, w: Tensor) -> Tensor:
        ctx.note = note
        return w.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note("backward", grad)
        return None, grad.mul_(2)


class Again(Function):
    """Runs a layer without a graph, and in backward with one: gradients of its weights go to ``.grad`` directly."""

    @staticmethod
    def forward(ctx: Any, note: Any, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.note, ctx.layer = note, layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note("backward", grad)
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, grad)
        return None, None, x.grad


class Square(Function):
    """x^2, twice differentiable."""

    @staticmethod
    def forward(ctx: Any, note: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.note = note
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note("backward", grad)
        return None, grad * 2 * ctx.saved_tensors[0]


class Log(Function):
    """log x: its derivative is infinite at 0, and 0 times infinity is no number."""

    @staticmethod
    def forward(ctx: Any, note: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.note = note
        return x.log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note("backward", grad)
        return None, grad / ctx.saved_tensors[0]


@torch.library.custom_op("gpipe_bench_tests::times", mutates_args=())
def registered(x: Tensor, w: Tensor, place: int) -> Tensor:
    return x * w


_NOTES: list[Callable[..., None]] = []
"""What the registered operator reports to: an operator takes no objects, so it gets a place in this list."""


def _registered_backward(ctx: Any, grad: Tensor) -> Any:
    _NOTES[ctx.place]("backward", grad)
    x, w = ctx.saved_tensors
    return grad * w, (grad * x).sum(0), None


def _registered_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *saved, ctx.place = inputs
    ctx.save_for_backward(*saved)


registered.register_autograd(_registered_backward, setup_context=_registered_setup)


@torch.library.custom_op("gpipe_bench_tests::drop", mutates_args=())
def drop_registered(x: Tensor) -> tuple[Tensor, Tensor]:
    """Draws without the tag that would say so."""
    mask = (torch.rand_like(x) > 0.5).to(x.dtype) * 2 - 1
    return x * mask, mask


drop_registered.register_autograd(
    lambda ctx, grad, _: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class Drop(Function):
    """Draws in its forward pass."""

    @staticmethod
    def forward(ctx: Any, note: Any, x: Tensor, mask_of: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.note, mask = note, mask_of(x)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note("backward", grad)
        return None, grad.mul_(ctx.saved_tensors[0]), None


class Applies(Layer):
    """A function of x and a weight."""

    function: type[Function] = Times

    def run(self, x: Tensor) -> Tensor:
        return self.function.apply(self.note, x, self.w)


class InPlace(Applies):
    function = TimesInPlace


class Freeing(Applies):
    function = TimesFreeing


class Scaling(Applies):
    function = TimesScaling


class Once(Applies):
    function = TimesOnce


class Asked(Applies):
    function = TimesAsked


class InPlaceBetweenAdditions(Layer):
    """Additions before and after it give their weights the very tensor that it writes to, or has written."""

    def make(self, draw: random.Random, rows: int) -> None:
        self.w, self.before, self.after = factors(), factors(rows), factors(rows)

    def run(self, x: Tensor) -> Tensor:
        return TimesInPlace.apply(self.note, x + self.before, self.w) + self.after


class InPlaceBesideLinear(Layer):
    """The addition gives one gradient to both; the linear layer, made later, reads it first."""

    def make(self, draw: random.Random, rows: int) -> None:
        self.w, self.matrix = factors(), nn.Parameter(mixing())

    def run(self, x: Tensor) -> Tensor:
        return TimesInPlace.apply(self.note, x, self.w) + nn.functional.linear(small(x), self.matrix)


class InPlaceInBranch(Layer):
    """x s + f(b), where f writes to the gradient that x s has got, too."""

    def make(self, draw: random.Random, rows: int) -> None:
        self.w, self.s, self.b = factors(), factors(rows), factors(rows)

    def run(self, x: Tensor) -> Tensor:
        b = TimesInPlace.apply(self.note, self.b, self.w)
        return x * self.s + b


class InPlaceOnView(Layer):
    def run(self, x: Tensor) -> Tensor:
        y = x * self.v
        TimesOnView.apply(self.note, y[:, :2], self.w[:2])
        return y


class Tagged(Layer):
    def make(self, draw: random.Random, rows: int) -> None:
        self.w = factors()
        tagged: Any = torch.ones(1).double()
        tagged.sign_of_it = -1
        self.tagged = tagged

    def run(self, x: Tensor) -> Tensor:
        return TimesTagged.apply(self.note, x, self.w, self.tagged)


class Unpacks(Layer):
    """Keeps what its operators save itself, and frees it when it is asked for, as offloading does."""

    def run(self, x: Tensor) -> Tensor:
        kept: list[Any] = []

        def pack(saved: Tensor) -> int:
            kept.append(saved.detach())
            return len(kept) - 1

        def unpack(place: int) -> Tensor:
            saved, kept[place] = kept[place], None
            self.note("unpack", saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return x * self.w


class InPlaceWithoutWeight(Layer):
    def run(self, x: Tensor) -> Tensor:
        return TimesInPlace.apply(self.note, x * self.w, self.v.detach())


class Fused(Layer):
    def make(self, draw: random.Random, rows: int) -> None:
        self.w, self.gives = factors(), draw.random() < 0.5
        self.w.main_grad = torch.zeros_like(self.w)

    def run(self, x: Tensor) -> Tensor:
        return TimesFused.apply(self.note, x, self.w, self.gives)


class OneOfTwo(Layer):
    """Of two outputs of a function one is used."""

    def make(self, draw: random.Random, rows: int) -> None:
        self.w, self.v, self.zeros = factors(), factors(), draw.random() < 0.5

    def run(self, x: Tensor) -> Tensor:
        return Twice.apply(self.note, x, self.w, self.v, self.zeros)[0]


class BothOfTwo(OneOfTwo):
    def run(self, x: Tensor) -> Tensor:
        one, other = Twice.apply(self.note, x, self.w, self.v, self.zeros)
        return one + 4 * other


class OneGradientForBoth(Layer):
    def make(self, draw: random.Random, rows: int) -> None:
        self.b = factors(rows)

    def run(self, x: Tensor) -> Tensor:
        return Plus.apply(self.note, x, self.b)


class Dirty(Layer):
    def run(self, x: Tensor) -> Tensor:
        return Minus.apply(self.note, x + self.w)


class RoundedWeight(Layer):
    def make(self, draw: random.Random, rows: int) -> None:
        self.matrix = nn.Parameter(mixing())

    def run(self, x: Tensor) -> Tensor:
        return nn.functional.linear(small(x), Rounded.apply(self.note, self.matrix))


class OneWeightTwice(Layer):
    def run(self, x: Tensor) -> Tensor:
        return TimesInPlace.apply(self.note, Times.apply(self.note, x, self.w) + self.v, self.w)


class Registered(Layer):
    """An operator of ``torch.library``."""

    def run(self, x: Tensor) -> Tensor:
        if self.note not in _NOTES:
            _NOTES.append(self.note)
        return registered(x, self.w, _NOTES.index(self.note))


class Checkpointed(Layer):
    """A checkpoint of PyTorch's within the layer."""

    def run(self, x: Tensor) -> Tensor:
        def within(x: Tensor) -> Tensor:
            return TimesInPlace.apply(self.note, x + self.v, self.w)

        return checkpoint(within, x, use_reentrant=False, preserve_rng_state=False)


class BackwardWithin(Layer):
    """Its function calls ``backward`` itself."""

    def run(self, x: Tensor) -> Tensor:
        return Again.apply(self.note, lambda x: TimesInPlace.apply(self.note, x, self.v) + self.v, x * self.w)


# --- hooks -----------------------------------------------------------------------------------------------------------


class HookOnInput(Layer):
    def run(self, x: Tensor) -> Tensor:
        return hooked(x, self.noting("input", 2)) * self.w


class HookOnOutput(Layer):
    def run(self, x: Tensor) -> Tensor:
        return hooked(x * self.w, self.noting("output", -1))


class HookWithin(Layer):
    def make(self, draw: random.Random, rows: int) -> None:
        super().make(draw, rows)
        self.matrix = nn.Parameter(mixing())

    def run(self, x: Tensor) -> Tensor:
        return hooked(nn.functional.linear(small(x), self.matrix), self.noting("within", 2)) * self.w


class HookInPlace(HookWithin):
    """A hook that writes to the gradient."""

    def run(self, x: Tensor) -> Tensor:
        def hook(grad: Tensor) -> None:
            self.note("within", grad)
            grad.mul_(2)

        return hooked(nn.functional.linear(small(x), self.matrix) * self.w, hook) * self.v


class HookOfMany(Layer):
    """One hook for two tensors."""

    def run(self, x: Tensor) -> Tensor:
        one = x * self.w
        other = one + self.v
        if other.requires_grad:
            torch.autograd.graph.register_multi_grad_hook((one, other), lambda grads: self.note("many", *grads))
        return other * 2


class HookOfNode(Layer):
    """Hooks before and after the node of a linear layer."""

    def make(self, draw: random.Random, rows: int) -> None:
        self.matrix = nn.Parameter(mixing())

    def run(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(small(x), self.matrix)
        if y.requires_grad:
            y.grad_fn.register_prehook(lambda grads: self.note("before the node", *grads))
            y.grad_fn.register_hook(lambda _, grads: self.note("after the node", *grads))
        return y


class HookOfNodeThatScales(Layer):
    """The hook after the node multiplies the gradients that the node gives, that of the weight, too."""

    def run(self, x: Tensor) -> Tensor:
        y = x * self.w

        def twice(grads: Any, _: Any) -> Any:
            self.note("after the node")
            return tuple(None if grad is None else grad * 2 for grad in grads)

        if y.requires_grad:
            y.grad_fn.register_hook(twice)
        return y


class HookOfModule(Layer):
    """Full backward hooks of a layer and of a layer in it."""

    def make(self, draw: random.Random, rows: int) -> None:
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.weight = nn.Parameter(mixing())
        for module, place in ((self, "outer"), (self.linear, "inner")):
            module.register_full_backward_pre_hook(
                lambda _, grads, place=place: self.note(f"before the {place} module", *grads)
            )
            module.register_full_backward_hook(
                lambda _, to, grads, place=place: self.note(f"after the {place} module", *to, *grads)
            )

    def run(self, x: Tensor) -> Tensor:
        return self.linear(small(x))


class HookOfParameter(Layer):
    """Hooks before and after a gradient is added; without checkpoints autograd may add up micro-batches before."""

    def make(self, draw: random.Random, rows: int) -> None:
        self.w, self.matrix = factors(), nn.Parameter(mixing())
        for weight in (self.w, self.matrix):
            weight.register_hook(self._twice)
            weight.register_post_accumulate_grad_hook(lambda _: self.note("parameter, after"))

    def _twice(self, grad: Tensor) -> Tensor:
        self.note("parameter, before")
        return grad * 2

    def run(self, x: Tensor) -> Tensor:
        return nn.functional.linear(small(x), self.matrix) * self.w


class Retained(HookWithin):
    """Keeps gradients of an inner tensor."""

    def make(self, draw: random.Random, rows: int) -> None:
        super().make(draw, rows)
        self.kept: list[Tensor] = []

    def run(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(small(x), self.matrix)
        if y.requires_grad:
            y.retain_grad()
            self.kept.append(y)
        return y * self.w


# --- nested calls of autograd ----------------------------------------------------------------------------------------


class Equilibrium(Layer):
    """Deep equilibrium: z = f(z) + x, whose gradient a hook finds by calls through f. f ends after four rounds."""

    def make(self, draw: random.Random, rows: int) -> None:
        self.shift, self.w = nn.Parameter(torch.randint(-1, 2, (WIDTH, WIDTH)).triu(1).double()), factors()

    def f(self, z: Tensor) -> Tensor:
        return nn.functional.linear(Square.apply(self.note, z) - z * z + z, self.shift)

    def run(self, x: Tensor) -> Tensor:
        x = small(x) * self.w
        with torch.no_grad():
            z = x
            for _ in range(WIDTH):
                z = self.f(z) + x
        if not torch.is_grad_enabled():
            return z
        z.requires_grad_()
        new = self.f(z) + x

        def solve(grad: Tensor) -> Tensor:
            self.note("solve", grad)
            handle.remove()
            found = grad
            for _ in range(WIDTH):
                found = torch.autograd.grad(new, z, found, retain_graph=True)[0] + grad
            return found

        handle = new.register_hook(solve)
        return new


class CallBefore(Layer):
    """A hook that runs backward where the outer pass will come."""

    def make(self, draw: random.Random, rows: int) -> None:
        super().make(draw, rows)
        self.matrix, self.u = nn.Parameter(mixing()), factors()

    def run(self, x: Tensor) -> Tensor:
        start = x * self.w
        middle = nn.functional.linear(hooked(start * self.v, self.noting("within")), self.matrix)
        end = middle * self.u

        def hook(grad: Tensor) -> Tensor:
            self.note("hook", grad)
            (more,) = torch.autograd.grad(middle, start, grad, retain_graph=True)
            return grad + more

        return hooked(end, hook)


class CallAfter(Layer):
    """A hook that runs backward where the outer pass has been; these nodes keep nothing."""

    def run(self, x: Tensor) -> Tensor:
        start = x * self.w
        middle = start + start.flip(1)
        end = middle + self.v

        def hook(grad: Tensor) -> Tensor:
            self.note("hook", grad)
            # The nested call would come here, too.
            handle.remove()
            (more,) = torch.autograd.grad(end, middle, torch.ones_like(end), retain_graph=True)
            return grad + more

        if middle.requires_grad:
            handle = middle.register_hook(hook)
        return end


class Forces(Layer):
    """The gradient of an energy is a value of the layer."""

    def run(self, x: Tensor) -> Tensor:
        builds = torch.is_grad_enabled()
        with torch.enable_grad():
            # Not x itself, whose hooks would be called, if it has any: those of layers before are there in some passes.
            place = (x if x.requires_grad else x.detach().requires_grad_()) * 1
            energy = (Square.apply(self.note, small(place)) * self.w).sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=builds)
        return x * self.v + 2 * (force if builds else force.detach())


# --- random numbers ---------------------------------------------------------------------------------------------------


class Draws(Layer):
    """Draws a mask, and tells the ledger."""

    def run(self, x: Tensor) -> Tensor:
        return x * self.w * self.ledger.mask(self.name, x, lambda: self.draw(x))

    def draw(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.ones_like(x), 0.5) - 1


class DrawsBernoulli(Draws):
    def draw(self, x: Tensor) -> Tensor:
        return 2 * torch.empty_like(x).bernoulli_(0.5) - 1


class DrawsPermutation(Draws):
    def draw(self, x: Tensor) -> Tensor:
        return torch.randperm(x.numel()).view_as(x).remainder(2).to(x) * 2 - 1


class DrawsInOperator(Draws):
    """Within an operator of ``torch.library``."""

    def run(self, x: Tensor) -> Tensor:
        y = x * self.w
        drawn: list[Tensor] = []

        def draw() -> Tensor:
            drawn[:] = drop_registered(y)
            return drawn[1]

        mask = self.ledger.mask(self.name, x, draw)
        return drawn[0] if drawn else y * mask


class DrawsInFunction(Draws):
    def run(self, x: Tensor) -> Tensor:
        return Drop.apply(self.note, x * self.w, lambda x: self.ledger.mask(self.name, x, lambda: self.draw(x)))


class DrawsLate(Draws):
    """From the second batch on."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(x) if self.ledger.step else x * self.w


class DrawsFromItsOwn(Draws):
    """From a generator of its own."""

    def make(self, draw: random.Random, rows: int) -> None:
        super().make(draw, rows)
        self.generator = torch.Generator().manual_seed(draw.randrange(1000))

    def draw(self, x: Tensor) -> Tensor:
        return torch.randint(2, x.shape, generator=self.generator).to(x) * 2 - 1


# --- outputs without a gradient ---------------------------------------------------------------------------------------


class Monitors(Layer):
    """A second output, which nothing uses, behind a hook."""

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.w, hooked(x * self.v, self.noting("monitor", 2))


class MonitorsFirst(Layer):
    """The graph of the unused output goes through a function, as that of the used one does."""

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        other = Times.apply(self.note, x, self.v)
        return TimesInPlace.apply(self.note, x, self.w), other


class MonitorsLog(Layer):
    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.w, Log.apply(self.note, small(x * self.v).abs() * torch.arange(WIDTH))


class MonitorsWriting(Layer):
    """The unused output's graph cannot run: a tensor that it has saved is another by then."""

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        square = small(x * self.v)
        other = square * square
        square.zero_()
        return x * self.w, other


class MonitorsInput(Layer):
    """Its input as it is, and a view of the used output."""

    def run(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * self.w
        return y, x, hooked(y[:, :2], self.noting("view", 2))


@skippable(stash=["skip"])
class Stashes(Layer):
    """Stashes a tensor with a hook."""

    def make(self, draw: random.Random, rows: int) -> None:
        super().make(draw, rows)
        self.space = Namespace()
        self.isolate(self.space)

    def forward(self, values: Any) -> Any:
        x = first(values)
        self.note("forward", x)
        yield stash("skip", hooked(TimesInPlace.apply(self.note, x, self.v), self.noting("skip", 2)))
        return x * self.w


@skippable(pop=["skip"])
class Pops(Layer):
    """Adds what was stashed, or leaves it."""

    uses = True

    def forward(self, values: Any) -> Any:
        x = first(values)
        self.note("forward", x)
        skip = yield pop("skip")
        return x * self.w + skip if self.uses else x * self.w


@skippable(peek=["skip"])
class Peeks(Layer):
    """Adds what was stashed, twice."""

    def forward(self, values: Any) -> Any:
        x = first(values)
        self.note("forward", x)
        skip = yield peek("skip")
        return x * self.w + TimesInPlace.apply(self.note, skip, self.v) * 2 + skip


# --- models -----------------------------------------------------------------------------------------------------------

KINDS: dict[str, type[Layer]] = {
    each.__name__: each
    for each in (
        InPlace, InPlaceBetweenAdditions, InPlaceBesideLinear, InPlaceInBranch, InPlaceOnView, InPlaceWithoutWeight,
        Fused, Freeing, Scaling, Tagged, Unpacks, Once, Asked, OneOfTwo, BothOfTwo, OneGradientForBoth, Dirty,
        RoundedWeight, OneWeightTwice, Registered, Checkpointed, BackwardWithin, HookOnInput, HookOnOutput,
        HookWithin, HookInPlace, HookOfMany, HookOfNode, HookOfNodeThatScales, HookOfModule, HookOfParameter,
        Retained, Equilibrium, CallBefore, CallAfter, Forces, Draws, DrawsBernoulli, DrawsPermutation,
        DrawsInOperator, DrawsInFunction, DrawsLate, DrawsFromItsOwn, Monitors, MonitorsFirst, MonitorsLog,
        MonitorsWriting, MonitorsInput,
    )
}  # fmt: skip
"""Layers with side effects, by name."""
SKIPS = ("skip", "skip that is left", "skip of many")
DRAWING = tuple(kind for kind, each in KINDS.items() if issubclass(each, Draws))
UNUSED = ("Monitors", "MonitorsFirst", "MonitorsLog", "MonitorsWriting", "MonitorsInput", "skip that is left")
"""Kinds with outputs that get no gradient."""


def random_model(kinds: Sequence[str], seed: int, rows: int, ledger: Ledger) -> nn.Sequential:
    """Children of one to three layers each: of ``kinds``, and linear layers and additions between them.

    Equal seeds give equal models.

    Args:
        kinds: names of :data:`KINDS` and :data:`SKIPS`; each occurs at least once.
        seed: of the model.
        rows: of a micro-batch.
        ledger: what all layers report to.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    count = draw.randint(4, 7)
    chosen = [KINDS[kind] for kind in kinds if kind in KINDS]
    chosen += draw.choices(chosen, k=min(2, len(chosen)))
    slots: list[list[Any]] = [[draw.choice([Linear, Add]) for _ in range(draw.choice([0, 0, 1]))] for _ in range(count)]
    for each in chosen:
        slot = draw.choice(slots)
        slot.insert(draw.randrange(len(slot) + 1), each)
    before: Any = None
    for slot in slots:
        there, slot[:] = [*slot] or [Linear], []
        for kind in there:
            if kind is HookOnInput and before in (HookOnOutput, Equilibrium, CallBefore):
                # Hooks of one tensor are called in the order in which layers register them; at a cut the later ones are
                # called first.
                slot.append(Linear)
            slot.append(kind)
            before = kind
    layers = [
        [kind(f"{place}.{number} {kind.__name__}", ledger, draw, rows) for number, kind in enumerate(slot)]
        for place, slot in enumerate(slots)
    ]
    for skip in SKIPS:
        if skip in kinds:
            start, end = sorted(draw.sample(range(count), 2))
            stashes = Stashes(f"{start} {skip}, stash", ledger, draw, rows)
            pops = Pops(f"{end} {skip}, pop", ledger, draw, rows).isolate(stashes.space)
            pops.uses = skip != "skip that is left"
            layers[start].append(stashes)
            if skip != "skip of many" or draw.random() < 0.5:
                layers[end].insert(0, pops)
            for number in range(draw.randint(2, 5) if skip == "skip of many" else 0):
                place = draw.randint(start + 1, end)
                peeks = Peeks(f"{place} {skip}, peek {number}", ledger, draw, rows).isolate(stashes.space)
                layers[place].insert(0, peeks)
    children = [layer[0] if len(layer) == 1 else nn.Sequential(*layer) for layer in layers]
    for child in children:
        child.requires_grad_(requires_grad=draw.random() < 0.9)
    return nn.Sequential(*children)
