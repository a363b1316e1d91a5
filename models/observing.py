"""Observes a run of a network on tensors without values: sizes, memory that is written, work, and every operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

from gpipe_bench.autograd.dispatch_mode import DispatchMode, tensors_in
from gpipe_bench.models.tracing import Entry, mode

# A memory-bound operation takes as long as this many floating-point operations per byte that it touches.
_FLOPS_PER_BYTE = 32


@dataclass
class Facts:
    """What one run showed of each node of a graph, by name.

    Attributes:
        nbytes: bytes of the result; nodes whose result is no Tensor are missing.
        storages: identity of the memory of the result.
        written: identities of the memories that the node wrote into.
        work: floating-point operations, and bytes touched at a fixed rate.
    """

    nbytes: dict[str, int] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)
    written: dict[str, set[int]] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)


def observe(module: nn.Module, graph: fx.Graph, shape: Sequence[int]) -> Facts:
    """Run the graph in training on an input without values; nothing is computed, written or drawn.

    Args:
        module: the graph's module.
        graph: from :func:`trace`.
        shape: of the input, (N, C, H, W).
    """
    with mode(module, training=True), _without_values(module):
        run = _Observer(Entry(module), graph)
        run.run(_input(module, shape))
        return run.facts


def operations(module: nn.Module, forward: nn.Module, shape: Sequence[int], *, training: bool) -> list[Any]:
    """Every operation with the shapes it gives, in order, as ``forward`` runs the parts of ``module``."""
    # What has no values already needs nothing that hides them, which takes most of the time.
    parts = [*module.parameters(), *module.buffers()]
    bare = bool(parts) and all(part.is_meta for part in parts)
    with (
        mode(module, training=training),
        mode(forward, training=training),
        _bare() if bare else _without_values(module),
        _Operations() as seen,
    ):
        forward(_input(module, shape))
    done: list[Any] = seen.done
    return done


def _input(module: nn.Module, shape: Sequence[int]) -> Tensor:
    first = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
    if first is None:
        return torch.empty(tuple(shape))
    return torch.empty(tuple(shape), device=first.device, dtype=first.dtype)


@contextmanager
def _without_values(module: nn.Module) -> Iterator[None]:
    # Random operations without values draw nothing; the state is kept for those that a forward draws by itself.
    # A count of batches on the CPU does change, since PyTorch computes with known numbers.
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng([]), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@contextmanager
def _bare() -> Iterator[None]:
    with torch.no_grad(), torch.device("meta"):
        yield


class _Operations(DispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves the mode untyped
    """Notes operations, what they write into, and their work."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.done: list[Any] = []
        self.written: set[int] = set()
        self.work = 0.0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, and note it."""
        result = func(*args, **kwargs)
        given, gave = list(tensors_in((args, kwargs))), list(tensors_in(result))
        self.done.append((str(func), [tuple(tensor.shape) for tensor in gave]))
        for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - public properties: pytorch#67254
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                self.written |= {_storage(tensor) for tensor in tensors_in(value)}
        if not func.is_view:
            self.work += _FLOPS_PER_BYTE * sum(tensor.nbytes for tensor in [*given, *gave])
        count = flop_registry.get(func._overloadpacket)  # noqa: SLF001 - the registry's own keys
        if count is not None:
            self.work += count(*args, **kwargs, out_val=result)
        return result


class _Observer(fx.Interpreter):
    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self.facts = Facts()
        # Memory that is freed would be handed out again, and look like the same.
        self._alive: list[Any] = []

    def run_node(self, n: fx.Node) -> Any:
        with _Operations() as seen:
            result = super().run_node(n)
        self._alive.append(result)
        self.facts.written[n.name] = seen.written
        self.facts.work[n.name] = seen.work
        if isinstance(result, Tensor):
            self.facts.nbytes[n.name] = result.nbytes
            self.facts.storages[n.name] = _storage(result)
        return result


def _storage(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - no two that are alive have the same
    return identity
