"""Where stashed tensors wait for their pop: a tracker, one current per thread.

A skippable layer neither knows whether the engine runs it nor how its skips travel. It hands them to the current
tracker. Outside the engine that is a plain dictionary, so the same model also runs as an nn.Sequential.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from gpipe_bench.engine.skip.namespace import SkipKey
from gpipe_bench.errors import SkipUsageError

__all__ = ["LocalTracker", "Tracker", "current_tracker", "use_tracker"]


class Tracker(Protocol):
    """Keeps skips between stash and pop."""

    def save(self, key: SkipKey, value: Tensor | None) -> None:
        """Take a stashed value; None is legal."""

    def load(self, key: SkipKey) -> Tensor | None:
        """Give a stashed value up.

        Raises:
            SkipUsageError: it was never stashed.
        """


class LocalTracker:
    """Skips that are stashed and popped in one place.

    Args:
        values: skips that were stashed elsewhere.
    """

    def __init__(self, values: Iterable[tuple[SkipKey, Tensor | None]] = ()) -> None:
        self._values: dict[SkipKey, Tensor | None] = dict(values)

    def save(self, key: SkipKey, value: Tensor | None) -> None:
        """Keep the value until its pop; a newer one replaces it."""
        self._values[key] = value

    def load(self, key: SkipKey) -> Tensor | None:
        """Give the value up; see :meth:`Tracker.load`."""
        if key not in self._values:
            raise SkipUsageError(f"skip {key[1]!r} must be stashed before it is popped, got no stash; order the layers")
        return self._values.pop(key)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.tracker: Tracker = LocalTracker()


_state = _ThreadState()


def current_tracker() -> Tracker:
    """The tracker that skippable layers of this thread use."""
    return _state.tracker


class use_tracker:  # noqa: N801 - reads as a statement: `with use_tracker(tracker):`
    """Make ``tracker`` the current one of this thread."""

    __slots__ = ("_previous", "_tracker")

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def __enter__(self) -> None:
        """Remember the current one, and change it."""
        self._previous = _state.tracker
        _state.tracker = self._tracker

    def __exit__(self, *_: object) -> None:
        """Put it back."""
        _state.tracker = self._previous
