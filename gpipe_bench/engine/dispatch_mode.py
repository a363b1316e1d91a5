"""The base of every mode that sees operators below autograd."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves the mode untyped
    """A mode that leaves ``torch.compile`` alone."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, imports torch.compile's machinery (half a second) only to keep it away from the mode.
        return False
