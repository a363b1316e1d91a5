"""The base of every mode that sees operators below autograd."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves the mode untyped
    """A mode that does not load the machinery of ``torch.compile``."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, imports it (half a second) only to keep it away from the mode.
        return False
