"""Trackers, which keep stashed tensors for their readers; each thread has a current one.

A skippable layer gives its skips to the current tracker, and does not know how they travel. Outside the engine the
tracker is a dictionary, so the same layers run in an nn.Sequential.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from gpipe_bench.errors import SkipUsageError
from gpipe_bench.skip.namespace import SkipKey


class Tracker(Protocol):
    """Keeps skips between their stash and their readers."""

    def save(self, key: SkipKey, value: Tensor | None) -> None:
        """Keep a stashed tensor, or None."""

    def load(self, key: SkipKey) -> Tensor | None:
        """Give a stashed value and keep it no longer.

        Raises:
            SkipUsageError: it was never stashed.
        """

    def peek(self, key: SkipKey) -> Tensor | None:
        """Give a stashed value and keep it; raises as :meth:`load`."""

    def leave(self, key: SkipKey) -> None:
        """A layer that peeks has ended."""


class LocalTracker:
    """Keeps skips in a dictionary, until they are popped.

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
        value = self.peek(key)
        del self.values[key]
        return value

    def peek(self, key: SkipKey) -> Tensor | None:
        """Give the value and keep it; see :meth:`Tracker.peek`."""
        if key not in self.values:
            raise _missing(key)
        return self.values[key]

    def leave(self, key: SkipKey) -> None:
        """Nothing: who else reads the value is not known."""


class CountingTracker:
    """Keeps a copy of each skip for each of its readers, in their order; readers may share one tensor.

    Args:
        arrived: the copies of skips that were stashed elsewhere.
        counts: how many copies to keep of a skip that is stashed here.
    """

    def __init__(self, arrived: Iterable[tuple[SkipKey, Tensor | None]], counts: Mapping[SkipKey, int]) -> None:
        self._copies: defaultdict[SkipKey, deque[Tensor | None]] = defaultdict(deque)
        self._counts = counts
        for key, value in arrived:
            self._copies[key].append(value)

    def save(self, key: SkipKey, value: Tensor | None) -> None:
        """Keep the value for its readers."""
        self._copies[key] = deque([value] * self._counts.get(key, 0))

    def load(self, key: SkipKey) -> Tensor | None:
        """Give the first copy and keep it no longer; see :meth:`Tracker.load`."""
        value = self.peek(key)
        self._copies[key].popleft()
        return value

    def peek(self, key: SkipKey) -> Tensor | None:
        """Give the first copy and keep it; see :meth:`Tracker.peek`."""
        if not self._copies[key]:
            raise _missing(key)
        return self._copies[key][0]

    def leave(self, key: SkipKey) -> None:
        """Drop the first copy, which nobody else reads."""
        self._copies[key].popleft()


def _missing(key: SkipKey) -> SkipUsageError:
    return SkipUsageError(f"skip {key[1]!r} must be stashed before it is read, got no stash; order the layers")


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
