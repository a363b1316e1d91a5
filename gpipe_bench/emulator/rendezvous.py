"""What the processes of an emulated script tell each other outside of virtual time: values, and who waits for whom.

Messages between virtual devices never block a process: the replay says when they run. Two things do wait for other
ranks while the script runs: messages of CPU tensors, and values of small tensors. Such a wait is given up where it can
never be over, as every rank that it depends on has ended, or waits itself. Values are unknown then, and the script goes
on; a message of CPU tensors ends in :class:`Stopped`.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

_LOOK_S: Final = 0.25
_LONGEST_S: Final = 0.05
_ENDED: Final = "ended"


class Stopped(BaseException):
    """This rank would wait for ever; the script is over, and its trace says why."""


class Rendezvous:
    """A rank at the store that all ranks share.

    Args:
        store: of the process that started the ranks.
        rank: this one.

    Attributes:
        gave_up: whether values that this rank waited for can never come.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self.gave_up = False
        self._waits = 0

    def tell(self, key: str, values: Sequence[Tensor | None] = ()) -> None:
        """Leave values for the other ranks under a key; None: nobody knows them."""
        self._store.set(f"{key}/{self._rank}", _packed(values))  # type: ignore[arg-type]  # its stub leaves bytes out

    def hear(self, key: str, ranks: Iterable[int]) -> None:
        """Wait until other ranks have left something under a key.

        Raises:
            Stopped: they never will.
        """
        if not self._await({rank: f"{key}/{rank}" for rank in ranks}, values=False):
            raise Stopped

    def values(self, key: str, ranks: Iterable[int]) -> list[list[Tensor | None]] | None:
        """The values that other ranks leave under a key, when they have; None: they never will."""
        wanted = {rank: f"{key}/{rank}" for rank in ranks}
        if not self._await(wanted, values=True):
            self.gave_up = True
            return None
        return [_unpacked(self._store.get(own)) for own in wanted.values()]

    def leave(self) -> None:
        """Say that this rank's script is over."""
        self._store.set(self._place(self._rank), _ENDED)

    def _await(self, wanted: dict[int, str], *, values: bool) -> bool:
        """Wait for keys; False if they never come. The store is asked ever less often, and who waits after a while."""
        keys, pause = list(wanted.values()), 0.001
        look, said = time.monotonic() + _LOOK_S, False
        found = self._store.check(keys)
        while not found:
            if time.monotonic() >= look:
                if not said:
                    self._waits += 1
                    self._store.set(self._place(self._rank), json.dumps([self._waits, wanted, values]))
                    said = True
                # All of them wait at one moment if two looks, one after the other, see the same.
                first = self._look(values=values)
                if first is not None and first == self._look(values=values):
                    break
                look = time.monotonic() + _LOOK_S
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
            found = self._store.check(keys)
        if said:
            self._store.set(self._place(self._rank), "")
        return found

    def _look(self, *, values: bool) -> dict[int, str] | None:
        """What the ranks say that this one depends on; None: one of them will go on.

        Args:
            values: whether this one waits for values. Who waits for a message counts one who does as going on, since
                that one gives up.
        """
        seen: dict[int, str] = {}
        ahead = [self._rank]
        while ahead:
            rank = ahead.pop()
            if rank in seen:
                continue
            place = self._place(rank)
            seen[rank] = self._store.get(place).decode() if self._store.check([place]) else ""
            if not seen[rank]:
                return None
            if seen[rank] == _ENDED:
                continue
            _, wanted, gives_up = json.loads(seen[rank])
            missing = [int(other) for other, key in wanted.items() if not self._store.check([key])]
            if not missing or (gives_up and not values):
                return None
            ahead += missing
        return seen

    @staticmethod
    def _place(rank: int) -> str:
        return f"waits/{rank}"


def _packed(values: Sequence[Tensor | None]) -> bytes:
    file = io.BytesIO()
    torch.save(list(values), file)
    return file.getvalue()


def _unpacked(packed: bytes) -> list[Tensor | None]:
    found: Any = torch.load(io.BytesIO(packed), weights_only=True)
    values: list[Tensor | None] = found
    return values
