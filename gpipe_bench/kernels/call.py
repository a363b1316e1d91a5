"""An operation as it is called: what it reads and writes, and the FLOPs of its direct algorithm.

Both laws of costs start from it: :mod:`.parts` for GPUs of today, :mod:`.roofline` for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from gpipe_bench.kernels.attention import AttentionCall

# They read as much of their first operand as they give, not all of it.
_GATHER: Final = frozenset({"embedding", "index_select", "gather", "index", "take"})
# Statistics first, then the result: two kernels, each of which reads everything.
_TWO_PASSES: Final = frozenset(
    {"native_batch_norm", "_native_batch_norm_legit", "native_batch_norm_backward", "_batch_norm_with_update"}
)


class Convolution(NamedTuple):
    """A convolution from x to y, or one of its gradients, which have its shapes.

    Attributes:
        direction: the convolution, its gradient of the data, or that of the weight.
        x: its input, or a tensor of that shape.
        y: its output, likewise.
        weight: its filters.
        stride: in each direction.
        dilation: likewise.
        transposed: whether it is a transposed convolution.
        groups: into which its channels are cut.
        dense: tensors that are copied before if they are not dense.
    """

    direction: Literal["forward", "data", "weight"]
    x: Tensor
    y: Tensor
    weight: Tensor
    stride: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    groups: int
    dense: Sequence[Tensor] = ()


class Call(NamedTuple):
    """An operation on tensors.

    Attributes:
        name: of the operation.
        args: what it is called with.
        operands: the tensors that it reads, each once; the last of a convolution's three is its bias.
        results: the tensors that it gives.
        flop: floating-point operations of the direct algorithm, 2 per multiply-add; None for what is bound by memory.
        convolution: more about a convolution or one of its gradients.
        attention: more about attention or its gradients.
        moments: of a recurrence, how often it reads its weight, the last operand.
    """

    name: str
    args: Sequence[Any]
    operands: Sequence[Tensor]
    results: Sequence[Tensor]
    flop: int | None = None
    convolution: Convolution | None = None
    attention: AttentionCall | None = None
    moments: int = 0

    @property
    def dtype(self) -> str:
        """The type of its result, such as ``float32``."""
        return str(self.results[0].dtype).removeprefix("torch.") if self.results else "float32"

    @property
    def launches(self) -> int:
        """Kernels that the host launches for it; at each moment of a recurrence a product and what follows it."""
        return 2 * self.moments or (2 if self.name in _TWO_PASSES else 1)

    @property
    def is_backward(self) -> bool:
        """Whether it gives gradients."""
        return "backward" in self.name

    @property
    def largest(self) -> Tensor:
        """The largest of its tensors."""
        return max((*self.operands, *self.results), key=lambda tensor: tensor.numel())

    @property
    def moved(self) -> int:
        """Bytes of all that it reads and writes."""
        return sum(map(occupied, (*self.operands, *self.results)))

    @property
    def read(self) -> int:
        """Bytes that it reads, in one pass."""
        sizes = [occupied(tensor) for tensor in self.operands]
        if self.name in _GATHER and sizes:
            sizes[0] = min(sizes[0], self.written)
        return sum(sizes)

    @property
    def written(self) -> int:
        """Bytes that it writes."""
        return sum(map(occupied, self.results))


def occupied(tensor: Tensor) -> int:
    """Bytes that reading the whole tensor touches: an expanded dimension counts once."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.nbytes
    return prod(size for size, stride in zip(tensor.shape, strides, strict=True) if stride) * tensor.element_size()
