"""Every exception that gpipe_bench raises on purpose, and its warnings.

    GpipeBenchError
    ├── ConfigError        (ValueError)    a configuration is wrong; carries *all* problems found
    ├── ScheduleError      (ValueError)    a schedule cannot run; carries *all* problems found
    ├── BalanceError       (ValueError)    a balance does not fit the model
    ├── DeviceCountError   (IndexError)    fewer devices than partitions, or more than a schedule can use
    ├── PlacementError     (TypeError)     the pipeline was asked to move as a whole
    ├── SkipLayoutError    (TypeError)     stashes and reads do not match; lists every mismatch
    ├── SkipUsageError     (RuntimeError)  a skippable layer broke its own declaration
    ├── RandomnessError    (RuntimeError)  a recomputation could not reproduce its random numbers
    ├── PeerError          (RuntimeError)  another process of a distributed pipeline has failed, or is gone
    ├── TraceError         (ValueError)    a layer cannot be traced, or a trace cannot be replayed
    ├── UnsupportedError   (RuntimeError)  settings that this machine, or a wrapper of the pipeline, cannot run
    ├── CompilerError      (RuntimeError)  there is no C compiler, or it failed
    ├── OutOfMemory        (RuntimeError)  a simulated device has too little memory
    └── OutputError        (OSError)       a result could not be written

    ReductionWarning       (UserWarning)   a loss of one's own is taken for a mean over samples

Each also derives from the built-in type that a user of torchgpipe or ``torch.nn`` would catch.
Messages follow one form: ``<thing> must be <rule>, got <value>; <what to change>``.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BalanceError",
    "CompilerError",
    "ConfigError",
    "DeviceCountError",
    "GpipeBenchError",
    "OutOfMemory",
    "OutputError",
    "PeerError",
    "PlacementError",
    "RandomnessError",
    "ReductionWarning",
    "ScheduleError",
    "SkipLayoutError",
    "SkipUsageError",
    "TraceError",
    "UnsupportedError",
]


def text_of(error: BaseException) -> str:
    """The class of an error and its text. The ``__str__`` of a user's class may fail: then the text says so."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as other:  # noqa: BLE001 - of a user's class
        return f"{type(error).__name__}, whose text is a {type(other).__name__}"


class GpipeBenchError(Exception):
    """Base of every exception raised on purpose."""


class _ListedError(GpipeBenchError, ValueError):
    """Something is wrong in one or more ways.

    Args:
        problems: one sentence per problem; all of them, not only the first.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__("; ".join(self.problems))


class ConfigError(_ListedError):
    """A configuration is wrong."""


class ScheduleError(_ListedError):
    """A schedule cannot run; each problem names the actions that it is about."""


class BalanceError(GpipeBenchError, ValueError):
    """A balance does not fit the model."""


class DeviceCountError(GpipeBenchError, IndexError):
    """Fewer devices than partitions, or more than a schedule can use."""


class PlacementError(GpipeBenchError, TypeError):
    """A pipeline spans several devices and cannot move to one."""


class SkipLayoutError(GpipeBenchError, TypeError):
    """Stashes and pops of a module do not match."""


class SkipUsageError(GpipeBenchError, RuntimeError):
    """A skippable layer broke its own declaration."""


class RandomnessError(GpipeBenchError, RuntimeError):
    """A recomputation could not reproduce random numbers that a layer is about to draw."""


class PeerError(GpipeBenchError, RuntimeError):
    """Another process of a distributed pipeline has failed, or is gone; the message names it and the cause."""


class TraceError(GpipeBenchError, ValueError):
    """A layer cannot be traced without values, or not with these shapes; or rows of a trace wait for each other."""


class UnsupportedError(GpipeBenchError, RuntimeError):
    """This machine, or a wrapper of the pipeline, cannot run the requested settings."""


class CompilerError(GpipeBenchError, RuntimeError):
    """The C code of the package cannot be compiled or loaded on this machine."""


class OutputError(GpipeBenchError, OSError):
    """A result could not be written."""


class OutOfMemory(GpipeBenchError, RuntimeError):  # noqa: N818 - after torch.OutOfMemoryError, which is no name of ours
    """A simulated device was asked for more memory than it has.

    Attributes:
        device: its number.
        needed: bytes of the segment that did not fit.
        reserved: bytes of the segments that the device holds.
        capacity: bytes of the device.
    """

    def __init__(self, device: int, needed: int, reserved: int, capacity: int) -> None:
        self.device, self.needed, self.reserved, self.capacity = device, needed, reserved, capacity
        super().__init__(
            f"memory of device {device} must suffice, got {reserved + needed} B needed of {capacity} B; use smaller "
            "micro-batches, more partitions or more checkpoints"
        )


class ReductionWarning(UserWarning):
    """How a loss of one's own reduces a batch is not known: micro-batches are weighted by their sizes."""
