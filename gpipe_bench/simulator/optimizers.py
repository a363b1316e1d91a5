"""What the step of an optimizer costs, traced on two parameters of different sizes: everything in it is elementwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from gpipe_bench.simulator.cost import total
from gpipe_bench.simulator.hardware import Profile
from gpipe_bench.simulator.steps import Kernel
from gpipe_bench.simulator.trace_cache import default_folder, read, write
from gpipe_bench.simulator.workload import Kernels

__all__ = ["OPTIMIZERS", "PROBE", "OptimizerTrace", "optimizer_kernels", "trace_optimizer"]

PROBE: Final = 1000
"""Elements of the parameter that is traced."""

OPTIMIZERS: Final = ("sgd", "momentum", "rmsprop", "adam")
"""``sgd`` without momentum, RMSprop with its defaults, as in the published runs."""


@dataclass(frozen=True, slots=True)
class OptimizerTrace:
    """One parameter's share of a step.

    Attributes:
        kernels: kernels for :data:`PROBE` float32 elements, with the zeroing of the gradient.
        state_per_element: bytes per element of each tensor of the state that has the shape of the parameter.
        temporary_per_element: bytes per element that a step holds while it lasts.
    """

    kernels: tuple[Kernel, ...]
    state_per_element: tuple[int, ...]
    temporary_per_element: int

    def scaled(self, elements: int) -> Iterable[Kernel]:
        """The kernels for a parameter of that many elements."""
        for kernel in self.kernels:
            read, written = (elements * value // PROBE for value in (kernel.bytes_read, kernel.bytes_written))
            yield kernel._replace(bytes_read=read, bytes_written=written)


def trace_optimizer(name: str, folder: Path | None = None) -> OptimizerTrace:
    """The trace of an optimizer in its second step, when its state is there.

    Args:
        name: one of :data:`OPTIMIZERS`.
        folder: of stored traces; the user's cache folder by default.

    Raises:
        ValueError: there is no such optimizer.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}; choose one of them")
    return _stored_trace(name, default_folder() if folder is None else folder)


@cache
def _stored_trace(name: str, folder: Path) -> OptimizerTrace:
    # A first optimizer loads PyTorch's compiler, which takes longer than many simulations.
    key = {"optimizer": name}
    known = read(folder, key, _decode)
    if known is None:
        from gpipe_bench.simulator.optimizer_trace import trace_step

        known = trace_step(name)
        write(folder, key, asdict(known))
    return known


def _decode(data: dict[str, Any]) -> OptimizerTrace:
    return OptimizerTrace(
        tuple(Kernel(*kernel) for kernel in data["kernels"]),
        tuple(data["state_per_element"]),
        data["temporary_per_element"],
    )


def optimizer_kernels(trace: OptimizerTrace, elements: Iterable[int], profile: Profile) -> Kernels:
    """A step for parameters of these sizes."""
    return total((kernel for count in elements for kernel in trace.scaled(count)), profile)
