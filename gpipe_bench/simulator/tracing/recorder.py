"""Watches the operations below autograd: which kernels run, and when each storage is born and dies.

It holds no tensor that it sees, so storages die exactly when the layer and its graph let them go.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpipe_bench.autograd.dispatch_mode import DispatchMode
from gpipe_bench.kernels.kernel import ACCUMULATE, NO_BLOCK, Alloc, Free, Kernel, Step
from gpipe_bench.kernels.meta_results import evaluate, storage_key
from gpipe_bench.kernels.operations import kernels_of, tensors_of
from gpipe_bench.kernels.parts import is_usual
from gpipe_bench.kernels.specs import TensorSpec, map_specs

_COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})  # noqa: SLF001 - it has no other name


class Recorder(DispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves the mode untyped
    """Records the steps of the operations that run under it.

    Attributes:
        steps: where the next steps go; replaced between the phases of a trace.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.steps: list[Step] = []
        self._blocks: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._next = 0
        # By storage: gradients whose dimensions are permuted in memory, as those of an output.
        self._strewn: dict[int, TensorSpec] = {}
        # Gradients of parameters, and blocks that were added to them: whether as a view.
        self._sums: set[int] = set()
        self._added: dict[int, bool] = {}
        # By block: the node of autograd that made it.
        self._makers: dict[int, int | None] = {}
        # Of a sum that autograd has just made: its step, and the block of its first operand.
        self._sum: tuple[int, int] | None = None

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` on shapes, and note its memory and its kernels."""
        # Below autograd the modes above it have no say, but every look at a tensor would ask them.
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - the only one that turns modes off too
            result = evaluate(func, args, kwargs)
            self._account(func, args, kwargs, result)
        return result

    def _account(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        keys = set(map(storage_key, tensors_of([*args, *kwargs.values()])))
        first = self._addend(func, args)
        self._sum = None if first == NO_BLOCK else (len(self.steps), first)
        for tensor in tensors_of(result):
            key = storage_key(tensor)
            if key not in keys and key not in self._blocks:
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    self.steps.append(Alloc(self.adopt(tensor), storage.nbytes()))
        kernels = self._kernels(func, args, kwargs, result)
        if func is torch.ops.aten.add_.Tensor and storage_key(args[0]) in self._sums:
            kernels = [kernel.of_kind(ACCUMULATE) for kernel in kernels]
            if args[1].is_contiguous():
                self._added[self.block(args[1])] = args[1]._is_view()  # noqa: SLF001 - autograd's own word
        self.steps += kernels

    def _addend(self, func: Any, args: Sequence[Any]) -> int:
        """The block of a gradient that autograd, not one of its nodes, adds another to; a node adds what it made."""
        if func is not torch.ops.aten.add.Tensor or not isinstance(args[1], Tensor) or args[0]._is_view():  # noqa: SLF001 - its word
            return NO_BLOCK
        block = self.block(args[0])
        return NO_BLOCK if self._makers.get(block) in (None, _node()) else block

    def _kernels(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> list[Kernel]:
        """The kernels of an operation, for which gradients are dense that are traced in the layout of an output."""
        if not any(storage_key(tensor) in self._strewn for tensor in tensors_of(args)):
            return kernels_of(func, args, kwargs, result)
        given, given_result = map_specs(self._dense, args), None
        if not func.is_view:
            for tensor in tensors_of(result):
                self._note_layout(tensor)
            given_result = map_specs(self._dense, result)
        kernels = kernels_of(func, given, kwargs, given_result)
        # They are dense as they come.
        return [kernel._replace(parts=()) for kernel in kernels] if func in _COPIES else kernels

    def _note_layout(self, tensor: Tensor) -> None:
        spec = TensorSpec.of(tensor)
        if spec.is_dense() and not is_usual(tensor):
            self._strewn[storage_key(tensor)] = spec

    def _dense(self, tensor: Tensor) -> Tensor:
        """The tensor, or one like it that is contiguous."""
        spec = self._strewn.get(storage_key(tensor))
        if spec is None or spec.shape != tensor.shape or spec.stride != tensor.stride():
            return tensor
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    def accumulate(self, gradients: Iterable[Tensor | None]) -> None:
        """Say which tensors are gradients of parameters."""
        self._sums = {storage_key(gradient) for gradient in gradients if gradient is not None}

    def adopt_gradient(self, gradient: Tensor) -> int:
        """The same for a gradient in the layout of an output; gradients really come contiguous, or channels last."""
        self._note_layout(gradient)
        return self.adopt(gradient)

    def adopt(self, tensor: Tensor) -> int:
        """Give the storage of ``tensor``, which appeared without an operation, its block."""
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key not in self._blocks:
            self._blocks[key] = self._next
            self._makers[self._next] = _node()
            self._watches[key] = weakref.ref(storage, partial(self._died, key))
            self._next += 1
        return self._blocks[key]

    def block(self, tensor: Tensor | None) -> int:
        """The block of a tensor; :data:`NO_BLOCK` for none, an empty one and parameters or buffers."""
        return NO_BLOCK if tensor is None else self._blocks.get(storage_key(tensor), NO_BLOCK)

    def alive(self) -> set[int]:
        """Blocks that somebody holds."""
        return set(self._blocks.values())

    def _died(self, key: int, _: object) -> None:
        del self._watches[key]
        block = self._blocks.pop(key)
        self._strewn.pop(key, None)
        if self._sum is not None and self._sum[1] == block and isinstance(made := self.steps[self._sum[0]], Alloc):
            self.steps[self._sum[0]] = replace(made, onto=block)
        self._sum = None
        self.steps.append(Free(block, block in self._added, self._added.get(block, False)))

    def take(self) -> tuple[Step, ...]:
        """The steps since the last call."""
        steps, self.steps, self._sum = tuple(self.steps), [], None
        return steps


def _node() -> int | None:
    """The number of the node of autograd that runs, by which its nodes differ; None in a forward pass."""
    node: Any = torch._C._current_autograd_node()  # noqa: SLF001 - it has no public name
    return None if node is None else int(node._sequence_nr())  # noqa: SLF001 - autograd's own count
