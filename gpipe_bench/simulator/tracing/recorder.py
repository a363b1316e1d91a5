"""Watches the operations below autograd: which kernels run, and when each storage is born and dies.

It holds no tensor that it sees, so storages die exactly when the layer and its graph let them go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_bench.simulator.tracing.attention import attention, fused_inside
from gpipe_bench.simulator.tracing.fused_kernels import dropout, gru_cell, lstm_cell, mish, rms_norm
from gpipe_bench.simulator.tracing.meta_results import evaluate, operation_key
from gpipe_bench.simulator.tracing.operations import kernels_of, tensors_of
from gpipe_bench.simulator.tracing.recurrent import RECURRENT, fused
from gpipe_bench.simulator.tracing.steps import NO_BLOCK, Alloc, Free, Kernel, Step

__all__ = ["AcceleratorFunctions", "Recorder"]

# Each gives None where PyTorch's own is right.
_FUSED: Final[Mapping[Any, Callable[..., Any]]] = {
    functional.dropout: dropout,
    functional.scaled_dot_product_attention: attention,
    functional.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    functional.mish: mish,
    torch.lstm_cell: lstm_cell,
    torch.gru_cell: gru_cell,
}

# By what is known of a call.
_known: Final[dict[Hashable, list[Kernel]]] = {}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves the mode untyped
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
        # Gradients of parameters, and blocks that were added to them: whether as a view.
        self._sums: set[int] = set()
        self._added: dict[int, bool] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, imports torch.compile's machinery (half a second) only to keep it away from this mode.
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Below autograd the modes above it have no say, but every look at a tensor would ask them.
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - the only one that turns modes off too
            known_as = operation_key(func, args, kwargs)
            result = evaluate(func, args, kwargs, known_as)
            self._account(known_as, func, args, kwargs, result)
        return result

    def _account(
        self, known_as: Hashable, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        operands = tensors_of([*args, *kwargs.values()])
        keys = set(map(_key, operands))
        for tensor in tensors_of(result):
            key = _key(tensor)
            if key not in keys and key not in self._blocks:
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    self.steps.append(Alloc(self.adopt(tensor), storage.nbytes()))
        self.steps += _kernels_of(known_as, operands, func, args, kwargs, result)
        if func is torch.ops.aten.add_.Tensor and _key(args[0]) in self._sums and args[1].is_contiguous():
            self._added[self.block(args[1])] = args[1]._is_view()  # noqa: SLF001 - autograd's own word

    def accumulate(self, gradients: Iterable[Tensor | None]) -> None:
        """Say which tensors are gradients of parameters."""
        self._sums = {_key(gradient) for gradient in gradients if gradient is not None}

    def adopt(self, tensor: Tensor) -> int:
        """Give the storage of ``tensor``, which appeared without an operation, its block."""
        storage = tensor.untyped_storage()
        key = _key(tensor)
        if key not in self._blocks:
            self._blocks[key] = self._next
            self._watches[key] = weakref.ref(storage, partial(self._died, key))
            self._next += 1
        return self._blocks[key]

    def block(self, tensor: Tensor | None) -> int:
        """The block of a tensor; :data:`NO_BLOCK` for none, an empty one and parameters or buffers."""
        return NO_BLOCK if tensor is None else self._blocks.get(_key(tensor), NO_BLOCK)

    def alive(self) -> set[int]:
        """Blocks that somebody holds."""
        return set(self._blocks.values())

    def _died(self, key: int, _: object) -> None:
        del self._watches[key]
        block = self._blocks.pop(key)
        self.steps.append(Free(block, block in self._added, self._added.get(block, False)))

    def take(self) -> tuple[Step, ...]:
        """The steps since the last call."""
        steps, self.steps = tuple(self.steps), []
        return steps


class AcceleratorFunctions(TorchFunctionMode):
    """Chooses the operation that PyTorch runs on an accelerator where it runs another one on the meta device.

    Dropout is one fused kernel there, which keeps a mask of one byte per element; attention, recurrent layers and
    their cells, RMS norms and the backward pass of Mish are fused, too.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        found: Any = None
        if func in RECURRENT:
            found = fused(func, args)
        elif func in _FUSED:
            found = _FUSED[func](*args, **kwargs)
        elif func is functional.multi_head_attention_forward:
            with fused_inside():
                found = func(*args, **kwargs)
        if found is not None:
            return found
        return func(*args, **kwargs)


def _kernels_of(known_as: Hashable, operands: Sequence[Tensor], func: Any, *call: Any) -> list[Kernel]:
    """Kernels of a call, looked up where one with equal operands was seen, of which the same ones are one tensor."""
    names = list(map(id, operands))
    key = known_as, tuple(map(names.index, names))
    if known_as is None or key not in _known:
        _known[key] = kernels_of(func, *call)
    return _known[key]


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - what tells storages apart; it has no public name
    return key
