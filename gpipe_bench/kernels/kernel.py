"""What a layer does, step by step, and the trace that a layer leaves: integers only, ready to be stored.

A block is one storage. Its number is local to the trace of a layer; inputs are blocks 0 .. inputs-1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

NO_BLOCK: Final = -1
"""In place of a block: there is no such tensor, as for a gradient that nobody needs."""

ACCUMULATE: Final = "accumulate"
"""Kind of the addition to the gradient of a parameter: the first gradient of a step is not added to anything."""

FOREACH: Final = "_foreach_"
"""How the names of operations begin that work on many tensors at once: one launch for all parameters of a type."""


class Whole(NamedTuple):
    """An operation as one kernel.

    Attributes:
        kind: the efficiency of a profile that it reaches, such as ``conv3x3_stride1``.
        bytes_read: bytes that it reads, counted once per pass over them.
        bytes_written: bytes that it writes.
        flop: floating-point operations of the direct algorithm, 2 per multiply-add; 0 for what is bound by memory.
        scratch: bytes of scratch memory if a convolution runs by Winograd's algorithm.
    """

    kind: str
    bytes_read: int = 0
    bytes_written: int = 0
    flop: int = 0
    scratch: int = 0


class Part(NamedTuple):
    """A kernel on the device, by the unit that bounds it.

    Attributes:
        kind: a law of :mod:`gpipe_bench.kernels.law`.
        bytes: that it reads and writes, each tensor once for each pass over it.
        units: elements, or floating-point operations.
        blocks: channels or planes that a norm works on side by side, or keys of attention.
    """

    kind: str
    bytes: int
    units: int = 0
    blocks: int = 0


class Kernel(NamedTuple):
    """One operation on the device.

    Attributes:
        op: name of the operation.
        dtype: of its result, such as ``float32``.
        launches: kernels that the host launches for it.
        whole: all of it in one: its class, bytes and FLOPs. That is what counts for devices whose profile has no
            constants, and for cuBLAS's workspace.
        parts: what it really runs on GPUs whose profile has constants; None: there are none for it, the whole counts.
        own_ns: its time, if that was measured; None: the profile says it.
    """

    op: str
    dtype: str
    launches: int
    whole: Whole
    parts: tuple[Part, ...] | None = None
    own_ns: int | None = None

    @classmethod
    def measured(cls, own_ns: int) -> Kernel:
        """All kernels of a pass, whose time was measured: it holds what the host adds, and no launch costs any more."""
        return cls("measured", "float32", 0, Whole("memory_bound"), own_ns=own_ns)

    @classmethod
    def copy(cls, op: str, nbytes: int) -> Kernel:
        """A copy of so many bytes within the device."""
        return cls(op, "float32", 1, Whole("memory_bound", nbytes, nbytes), (Part("stream", 2 * nbytes),))

    @classmethod
    def sum(cls, nbytes: int) -> Kernel:
        """A sum of two gradients of so many bytes."""
        return cls("add", "float32", 1, Whole("memory_bound", 2 * nbytes, nbytes), (Part("stream", 3 * nbytes),))

    def mapped(self, change: Callable[[int], int]) -> Kernel:
        """The same with its bytes, FLOPs and elements changed, one number after the other."""
        whole = Whole(self.whole.kind, *map(change, self.whole[1:]))
        parts = self.parts and tuple(Part(part.kind, *map(change, part[1:])) for part in self.parts)
        return Kernel(self.op, self.dtype, self.launches, whole, parts)

    def of_kind(self, kind: str) -> Kernel:
        """The same with all of its parts of one kind."""
        return self._replace(parts=tuple(part._replace(kind=kind) for part in self.parts or ()))

    @property
    def adds(self) -> bool:
        """Whether it adds to the gradient of a parameter."""
        return any(part.kind == ACCUMULATE for part in self.parts or ())


@dataclass(frozen=True, slots=True)
class Alloc:
    """A storage comes into being.

    Attributes:
        block: the storage.
        bytes: its size.
        onto: of a sum that autograd makes of gradients, the first one, if nobody needs that any more: then autograd
            writes the sum there, unless somebody watches. That of the published runs did not.
    """

    block: int
    bytes: int
    onto: int = NO_BLOCK


@dataclass(frozen=True, slots=True)
class Free:
    """The layer and its graph hold the storage no more.

    Attributes:
        block: the storage.
        gradient: whether it was added to the gradient of a parameter, which it becomes where there is none yet.
        view: whether the added gradient is a view, as that of a linear layer's weight, which autograd transposes.
    """

    block: int
    gradient: bool = False
    view: bool = False


Step = Kernel | Alloc | Free


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor that leaves a layer.

    Attributes:
        block: its storage; an input's where the layer passes the input on.
        bytes: of the tensor, which may be a part of the storage.
        view: whether it is a view that the layer made: to write to one costs the backward pass two copies
            (``CopySlices``).
    """

    block: int
    bytes: int
    view: bool = False


class _Trace:
    __slots__ = ()

    def kernels(self, direction: str) -> Iterator[Kernel]:
        """The kernels of one of its passes, by the attribute's name."""
        return (step for step in getattr(self, direction) if isinstance(step, Kernel))


@dataclass(frozen=True, slots=True)
class LayerTrace(_Trace):
    """One layer at one batch size.

    Attributes:
        inputs: tensors that come in, skips last.
        outputs: tensors that leave, stashed skips last, in the pass with graph.
        plain_outputs: the same in the pass without graph.
        stashed: for each stashed skip, its place among the skips that the layer declares to stash.
        read: for each skip that it pops or peeks, its place among those that it declares so.
        forward: the pass with graph.
        plain: the pass without.
        backward: the backward pass; parameter gradients are added to what is there.
        kept: blocks that the graph holds after the forward pass, inputs among them.
        output_gradients: block of the gradient of each output.
        input_gradients: block of the gradient of each input.
        nodes: autograd nodes that the forward pass makes.
        writes: inputs that the layer writes to in place.
        views: of each input, whether its gradient is a view, which nobody else can hold.
        fits: of each input, whether its gradient is laid out in memory as the input is.
        needs: of each input, whether it needs a gradient.
    """

    inputs: int
    outputs: tuple[Port, ...]
    plain_outputs: tuple[Port, ...]
    stashed: tuple[int, ...]
    read: tuple[int, ...]
    forward: tuple[Step, ...]
    plain: tuple[Step, ...]
    backward: tuple[Step, ...]
    kept: tuple[int, ...]
    output_gradients: tuple[int, ...]
    input_gradients: tuple[int, ...]
    nodes: int
    writes: tuple[int, ...] = ()
    views: tuple[bool, ...] = ()
    fits: tuple[bool, ...] = ()
    needs: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class SplitTrace(_Trace):
    """The backward pass of one layer in two parts: I, the gradients of the inputs, and W, those of the weights.

    Blocks of the forward pass have the numbers of its :class:`LayerTrace`.

    Attributes:
        inputs: I.
        weights: W.
        released: blocks that are freed when I of the whole partition is over.
        hidden: blocks that its nodes hold without showing them. They stay while a later layer of the partition waits
            for W, whose nodes hold these.
        kept: blocks that stay from I to W.
        output_gradients: block of the gradient of each output.
        input_gradients: block of the gradient of each input.
        whole: whether the two parts cannot be told apart; then I is all of the backward pass, and nothing else is said.
    """

    inputs: tuple[Step, ...] = ()
    weights: tuple[Step, ...] = ()
    released: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    output_gradients: tuple[int, ...] = ()
    input_gradients: tuple[int, ...] = ()
    whole: bool = False


SplitLayers = Callable[[int], SplitTrace]
"""Layer of a partition -> I and W of the layer."""


class Parameter(NamedTuple):
    """A trained parameter: its elements, their type's name, as in ``float32``, and its bytes without the gradient."""

    elements: int
    dtype: str
    bytes: int


class TiedWeight(NamedTuple):
    """A parameter that an earlier layer has, too.

    Attributes:
        first: the place of the first layer that has it.
        number: that tells it from others.
        bytes: of its values.
        trained: whether it gets a gradient.
    """

    first: int
    number: int
    bytes: int
    trained: bool


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """A layer's parameters, buffers and skips.

    Attributes:
        parameters: trained ones that no earlier layer has.
        others: bytes of each buffer, and of each frozen parameter that no earlier layer has.
        stashes: skips that the layer stashes, by number: its place among all stashes of the model.
        reads: skips that it pops or peeks, by the same number.
        tied: parameters that an earlier layer has.
    """

    parameters: tuple[Parameter, ...]
    others: tuple[int, ...]
    stashes: tuple[int, ...]
    reads: tuple[int, ...]
    tied: tuple[TiedWeight, ...] = ()

    @property
    def learns(self) -> bool:
        """Whether a parameter of the layer is trained."""
        return bool(self.parameters) or any(weight.trained for weight in self.tied)
