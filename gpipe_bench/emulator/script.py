"""Runs somebody's training script on virtual devices, in virtual time.

    script ── real threads, autograd, streams ──> trace ──> replay ──> times of steps, memory, races

A step ends with the step of an optimizer of PyTorch: of the first one that makes a step, where there are several. In a
script without one it ends with a backward pass that the script's own thread calls, and that is inside no other.
"""

from __future__ import annotations

import re
import runpy
import sys
import traceback
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import gpipe_bench
from gpipe_bench.emulator.handovers import replaced, seen
from gpipe_bench.emulator.library import each_row, thread_index
from gpipe_bench.emulator.races import Race, find_races
from gpipe_bench.emulator.recording import mark, recording
from gpipe_bench.emulator.shapes import load_shapes, updates_priced
from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.profile import HardwareMachine, Profile
from gpipe_bench.machine.replay import Replayed, replay
from gpipe_bench.machine.trace import Record, Trace
from gpipe_bench.models.torchvision_repair import mend_torchvision

_LIBRARIES: Final = tuple(str(Path(module.__file__ or "").parent) for module in (torch, gpipe_bench))
_INTERNAL: Final = ("<frozen", "<string>")
_TRACED: Final = re.compile(r'File "(.+?)", line (\d+)')
_OWN: Final = str(Path(__file__).parent)
_compile: Final = torch.compile


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """The run of a script.

    Attributes:
        records: the trace.
        replayed: when its records ran.
        step_ends_ns: when everything that was issued in each step, and before it, had ended.
        races: accesses that nothing orders, if they were asked for.
        lines: row of the trace -> line of Python; likewise.
    """

    records: list[Record]
    replayed: Replayed
    step_ends_ns: list[int]
    races: list[Race]
    lines: dict[int, str]

    @property
    def step_times_ms(self) -> list[float]:
        """The time of each step but the first, which begins with the script."""
        return [(end - begin) / 1e6 for begin, end in pairwise(self.step_ends_ns)]

    @property
    def window(self) -> tuple[int, int]:
        """From the end of the first step to that of the last, or all of a script of less than two; nanoseconds."""
        ends = self.step_ends_ns
        return (ends[0], ends[-1]) if len(ends) > 1 else (0, max(self.replayed.end_ns, default=0))


def run_script(
    script: Path, arguments: Sequence[str], *, devices: int, profile: Profile, races: bool, host_time: bool
) -> ScriptRun:
    """Run a script to its end; once per process, which has virtual devices from then on.

    Args:
        script: a Python file.
        arguments: of the script, in ``sys.argv`` after its name.
        devices: how many virtual devices it finds.
        profile: hardware of each device.
        races: whether to look for accesses that nothing orders.
        host_time: whether launches take the host the time that the profile says.

    Raises:
        ConfigError: there is no such file.
        torch.OutOfMemoryError: in the script, where its tensors do not fit a device.
        Exception: whatever the script raises.
    """
    if not script.is_file():
        raise ConfigError([f"script must be a Python file, got {str(script)!r}; check the path"])
    load_shapes(devices, profile)
    lines = Lines()
    watched = lines.noted() if races else nullcontext()
    compiling = replaced(torch, "compile", uncompiled)
    with recording() as trace, seen(), updates_priced(), steps_marked(), compiling, watched:
        _run(script, arguments)
    replayed = replay(trace, HardwareMachine(profile), host_time=host_time)
    records = trace.records
    found = find_races(records) if races else []
    return ScriptRun(records, replayed, _step_ends(trace, replayed), found, lines.of)


def _run(script: Path, arguments: Sequence[str]) -> None:
    """Run a script as ``python SCRIPT ARGUMENTS`` does."""
    mend_torchvision()
    before, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.argv, sys.path[:] = before, path


def script_traceback(error: Exception, script: Path) -> str | None:
    """What ``python SCRIPT`` would print of an error; None if it is none of the script's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    if frames is None and not (isinstance(error, SyntaxError) and error.filename == str(script)):
        return None
    shown = traceback.TracebackException.from_exception(error.with_traceback(frames))
    found: traceback.TracebackException | None = shown
    while found is not None:
        found.stack = traceback.StackSummary.from_list(
            [frame for frame in found.stack if not frame.filename.startswith(_OWN)]
        )
        found = found.__cause__ or found.__context__
    return "".join(shown.format())


def uncompiled(model: Any = None, **options: Any) -> Any:
    """In place of ``torch.compile``, which makes kernels for real devices only.

    PyTorch calls it for higher-order operators, such as ``map``, too: with a function as backend, which runs operators.
    """
    if callable(options.get("backend")):
        return _compile(model, **options)
    warnings.warn(
        "torch.compile does nothing on virtual devices: times are those of eager operators, without fused kernels",
        stacklevel=2,
    )
    return (lambda function: function) if model is None else model


@contextmanager
def steps_marked() -> Iterator[None]:
    """Mark the trace after each step of the first optimizer of PyTorch; of the next one when that is gone."""
    first: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        if not first:
            first.add(optimizer)
        if optimizer in first:
            mark()

    handle = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        handle.remove()


def _step_ends(trace: Trace, replayed: Replayed) -> list[int]:
    return step_ends(trace.records, replayed.end_ns, thread_index())


def step_ends(records: Sequence[Record], ends_ns: Sequence[int], main: int) -> list[int]:
    """When everything that was issued in each step, and before it, had ended.

    Args:
        records: of one process.
        ends_ns: when each ended.
        main: the thread of the script.
    """
    ended = list(accumulate(ends_ns, max))
    marks = [row for row, record in enumerate(records) if record.kind == "mark"]
    if marks:
        return [ended[row] for row in marks]
    ends: list[int] = []
    latest: int | None = None
    for row, kind in enumerate(_outermost(records, main)):
        if kind == "backward" and latest is not None:
            ends.append(ended[latest])
            latest = None
        elif kind == "backward_end":
            latest = row
    return ends if latest is None else [*ends, ended[latest]]


def _outermost(records: Sequence[Record], main: int) -> list[str]:
    """The kinds of rows, but nothing for those of other threads than the script's, and inside of backward passes."""
    depth = 0
    kinds = []
    for record in records:
        own = record.thread == main
        depth -= own and record.kind == "backward_end"
        kinds.append(record.kind if own and depth == 0 else "")
        depth += own and record.kind == "backward"
    return kinds


class Lines:
    """The line of Python that issued each kernel and copy of a trace.

    In the forward pass it is the innermost line outside PyTorch and this package. Autograd's threads run no Python:
    there it is the line whose operation the backward pass belongs to. PyTorch notes it while anomaly detection is on.

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
