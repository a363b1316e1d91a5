"""What partitions send each other: every value has a box of its own, which one thread fills and one empties."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from queue import SimpleQueue
from typing import Any

__all__ = ["Mailboxes", "Stopped"]

_WAKE = object()


class Stopped(Exception):  # noqa: N818 - no error of its own: another action has failed
    """The awaited value will never come."""


class Mailboxes:
    """Boxes by key, and the first action that will not run.

    Args:
        keys: all that will ever be used.
        places: how many actions there are; each has a place in one order of all.

    Attributes:
        limit: actions from this place on do not run.
    """

    def __init__(self, keys: Iterable[Hashable], places: int) -> None:
        self.limit = places
        self._boxes: dict[Hashable, SimpleQueue[Any]] = {key: SimpleQueue() for key in keys}
        self._lock = threading.Lock()

    def put(self, key: Hashable, value: Any) -> None:
        """Fill a box."""
        self._boxes[key].put(value)

    def take(self, key: Hashable, place: int) -> Any:
        """Wait until a box is filled, and empty it.

        Args:
            key: the box.
            place: of the action that waits.

        Raises:
            Stopped: that action will not run.
        """
        while (value := self._boxes[key].get()) is _WAKE:
            if place >= self.limit:
                raise Stopped
        return value

    def stop(self, place: int = -1) -> None:
        """Let no action from this place on run, and wake all that wait."""
        with self._lock:
            self.limit = min(self.limit, place)
        for box in self._boxes.values():
            box.put(_WAKE)

    def clear(self) -> None:
        """Drop everything."""
        self._boxes.clear()
