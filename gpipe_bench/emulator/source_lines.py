"""The line of Python that issued each kernel and copy of a trace.

In the forward pass it is the innermost line outside PyTorch and this package. Autograd's threads run no Python; there
it is the line whose operation the backward pass belongs to, which PyTorch notes while anomaly detection is on.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

import gpipe_bench
from gpipe_bench.emulator.library import each_row

_LIBRARIES: Final = tuple(str(Path(module.__file__ or "").parent) for module in (torch, gpipe_bench))
_INTERNAL: Final = ("<frozen", "<string>")
_TRACED: Final = re.compile(r'File "(.+?)", line (\d+)')


class Lines:
    """Lines by row of a trace.

    Attributes:
        of: row of the trace -> ``file:line``; rows that nothing is known of are absent.
    """

    def __init__(self) -> None:
        self.of: dict[int, str] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the line of each kernel and copy that is issued in the block."""
        with warnings.catch_warnings():
            # That it takes time is known.
            warnings.simplefilter("ignore", UserWarning)
            detection = torch.autograd.detect_anomaly(check_nan=False)
        with warnings.catch_warnings(), detection, each_row(self._note):
            # The script may catch what a backward pass raises.
            warnings.filterwarnings("ignore", "Error detected in ", UserWarning)
            yield

    def _note(self, row: int) -> None:
        line = _calling(sys._getframe().f_back) or _differentiated()  # noqa: SLF001 - traceback's own way is ten times slower
        if line:
            self.of[row] = line


def _calling(frame: FrameType | None) -> str:
    """The innermost line of the user's code; of a library where there is no other; empty without any."""
    inner = ""
    while frame is not None:
        name = frame.f_code.co_filename
        line = f"{name}:{frame.f_lineno}"
        if not name.startswith((*_LIBRARIES, *_INTERNAL)):
            return line
        inner = inner or line
        frame = frame.f_back
    return inner


def _differentiated() -> str:
    """The line of the operation whose backward pass runs in this thread."""
    node: Any = torch._C._current_autograd_node()  # noqa: SLF001 - it has no public name
    written = node.metadata.get("traceback_", ()) if node is not None else ()
    for entry in reversed(written):
        found = _TRACED.search(entry)
        if found and not found[1].startswith((*_LIBRARIES, *_INTERNAL)):
            return f"{found[1]}:{found[2]}, in its backward pass"
    return ""
