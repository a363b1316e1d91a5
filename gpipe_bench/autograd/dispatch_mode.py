"""The base of every mode that sees operators below autograd, and the tensors that it finds there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.autograd import forward_ad

# Private in name only: PyTorch's notes on extending it have the class under this name (pytorch#110073).
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves the mode untyped
    """A mode that neither loads ``torch.compile`` nor is compiled by it, with a layer that it sees.

    A higher-order operator, such as ``torch.cond`` or ``flex_attention``, is no operator to :meth:`run`: the functions
    that it is given run in the mode, so all operators in them do.

    Attributes:
        traced: whether something was seen that may not run in two threads at once: a higher-order operator, since
            PyTorch traces the functions that it is given, or an operator under forward-mode derivatives, whose levels
            belong to the process.
    """

    supports_higher_order_operators = True
    traced = False

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, outside of the mode; here as it is."""
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by PyTorch for each operator, outside of the mode."""
        if isinstance(func, HigherOrderOperator):
            self.traced = True
            return func(*tree_map(self._inside, args), **tree_map(self._inside, kwargs or {}))
        self.traced |= forward_ad._current_level >= 0  # noqa: SLF001 - there is no public way to ask
        return self.run(func, args, kwargs or {})

    def _inside(self, value: Any) -> Any:
        """A function that runs in the mode; anything else as it is."""
        if isinstance(value, Tensor | type) or not callable(value):
            return value
        function: Callable[..., Any] = value

        def run_inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return run_inside

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let layers be compiled within this mode: operators of a compiled layer are seen when it runs.

        Else PyTorch would not compile them, neither here nor, since it remembers, in later batches.
        """
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, imports it only to keep it away from the mode. PyTorch 2.13 calls the switch temporary.
        return False


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
