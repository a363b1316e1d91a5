"""Trackers, which keep stashed tensors until their pop; each thread has a current one.

A skippable layer gives its skips to the current tracker, and does not know how they travel. Outside the engine the
tracker is a dictionary, so the same layers run in an nn.Sequential.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from gpipe_bench.errors import SkipUsageError
from gpipe_bench.skip.namespace import SkipKey


class Tracker(Protocol):
    """Keeps skips between stash and pop."""

    def save(self, key: SkipKey, value: Tensor | None) -> None:
        """Keep a stashed tensor, or None."""

    def load(self, key: SkipKey) -> Tensor | None:
        """Give a stashed value and keep it no longer.

        Raises:
            SkipUsageError: it was never stashed.
        """


class LocalTracker:
    """Keeps skips in a dictionary.

    Args:
        values: skips that were stashed elsewhere.

    Attributes:
        values: what is stashed and was not popped.
    """

    def __init__(self, values: Iterable[tuple[SkipKey, Tensor | None]] = ()) -> None:
        self.values: dict[SkipKey, Tensor | None] = dict(values)

    def save(self, key: SkipKey, value: Tensor | None) -> None:
        """Keep the value until its pop, or until another value replaces it."""
        self.values[key] = value

    def load(self, key: SkipKey) -> Tensor | None:
        """Give the value and keep it no longer; see :meth:`Tracker.load`."""
        if key not in self.values:
            raise SkipUsageError(f"skip {key[1]!r} must be stashed before it is popped, got no stash; order the layers")
        return self.values.pop(key)


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
