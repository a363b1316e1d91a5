"""The base of every mode that sees operators below autograd, and the tensors that it finds there."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

# Private in name only: PyTorch's notes on extending it have the class under this name (pytorch#110073).
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves the mode untyped
    """A mode that does not load the machinery of ``torch.compile``."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, imports it (half a second) only to keep it away from the mode. PyTorch 2.13 calls the
        # switch temporary; torch.compiler.disable is the public one, and imports it, too.
        return False


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
