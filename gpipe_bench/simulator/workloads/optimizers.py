"""What the step of an optimizer costs, traced on one parameter of each type: everything in it is elementwise.

PyTorch's operators work on all parameters of a type at once, with one launch for all of them, and gradients are given
up after the step. The published runs had a launch for each parameter, and set gradients to zero.

In mixed precision the optimizer has a master copy of each parameter in float32, and state of that type (Rajbhandari et
al., arXiv 1910.02054, section 3.1).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

from gpipe_bench.kernels.kernel import FOREACH, Kernel, LayerFacts
from gpipe_bench.settings import HALVES, checked
from gpipe_bench.simulator.tracing.trace_cache import default_folder, kept
from gpipe_bench.step.request import Optimizer

PROBE: Final = 1000
"""Elements of the parameter that is traced."""


@dataclass(frozen=True, slots=True)
class OptimizerTrace:
    """The share of a step of one parameter of some type.

    Attributes:
        kernels: kernels for :data:`PROBE` elements.
        state_per_element: bytes per element of each tensor of the state that has the shape of the parameter.
        temporary_per_element: bytes per element that a step holds while it lasts.
        master_per_element: bytes per element of the copy in float32 that the optimizer updates; 0 for none.
        together: whether it updates all parameters together, not one after the other.
    """

    kernels: tuple[Kernel, ...]
    state_per_element: tuple[int, ...]
    temporary_per_element: int
    master_per_element: int
    together: bool

    def scaled(self, sizes: Sequence[int]) -> Iterator[Kernel]:
        """The kernels for parameters of so many elements."""
        for kernel in self.kernels:
            for elements in (sum(sizes),) if kernel.op.startswith(FOREACH) else sizes:
                yield kernel.mapped(partial(_scaled, elements))

    def temporary(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Bytes of each tensor that a step of such parameters holds while it lasts."""
        held = sizes if self.together else (max(sizes),)
        return tuple(elements * self.temporary_per_element for elements in held if self.temporary_per_element)


def _scaled(elements: int, number: int) -> int:
    return elements * number // PROBE


def trace_optimizer(
    name: str, dtypes: Collection[str], folder: Path | None = None, *, masters: bool = False, published: bool = False
) -> dict[str, OptimizerTrace]:
    """The traces of an optimizer in its second step, when its state is there, by the parameter's type.

    Args:
        name: one of :data:`OPTIMIZERS`.
        dtypes: types of parameters, as in ``float32``.
        folder: of stored traces; the user's cache folder by default.
        masters: whether it updates parameters in a half by copies in float32.
        published: whether it is that of the published runs.

    Raises:
        ValueError: there is no such optimizer.
    """
    checked("optimizer", Optimizer, name)
    place = default_folder() if folder is None else folder
    return {
        dtype: _kept_trace(name, dtype, place, master=masters and dtype in HALVES, published=published)
        for dtype in dtypes
    }


@cache
def _kept_trace(name: str, dtype: str, folder: Path, *, master: bool, published: bool) -> OptimizerTrace:
    def trace() -> OptimizerTrace:
        # A first optimizer loads PyTorch's compiler, which takes longer than many simulations.
        from gpipe_bench.simulator.workloads.optimizer_trace import trace_step

        return trace_step(name, dtype, master=master, published=published)

    return kept(folder, {"optimizer": name, "dtype": dtype, "master": master, "published": published}, trace)


def optimizer_kernels(traces: Mapping[str, OptimizerTrace], layers: Iterable[LayerFacts]) -> Iterator[Kernel]:
    """The kernels of a step for the parameters of layers; ``traces``: by their types."""
    for dtype, sizes in sizes_by_type(layers).items():
        yield from traces[dtype].scaled(sizes)


def sizes_by_type(layers: Iterable[LayerFacts]) -> dict[str, list[int]]:
    """The elements of each parameter of layers, by type."""
    found: dict[str, list[int]] = {}
    for item in (parameter for layer in layers for parameter in layer.parameters):
        found.setdefault(item.dtype, []).append(item.elements)
    return found
