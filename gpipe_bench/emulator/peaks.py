"""What the memory of a device holds at its peak: blocks, by the operator or message that first wrote each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from gpipe_bench.machine.replay import Replayed
from gpipe_bench.machine.trace import Record

_WRITING: Final = frozenset({"kernel", "copy", "meet"})
_ROUND: Final = 512
UNWRITTEN: Final = "never written"
"""Blocks that nothing writes, such as cuBLAS's workspaces."""


class Held(NamedTuple):
    """Blocks of a device that are alike.

    Attributes:
        source: what first wrote them: an operator or a message; of a backward pass, if it ran in one.
        blocks: how many.
        nbytes: of all, as the allocator rounds them.
    """

    source: str
    blocks: int
    nbytes: int


def held_at_peak(records: Sequence[Record], replayed: Replayed, device: int) -> list[Held]:
    """The blocks that a device holds when it holds the most, the largest part first.

    Args:
        records: of the trace.
        replayed: when they ran.
        device: which one.
    """
    source: dict[int, str] = {}
    own: list[tuple[int, Record]] = []
    for row, record in enumerate(records):
        if record.device != device:
            continue
        if record.kind in _WRITING:
            for block in record.writes:
                source.setdefault(block, record.name + (" in a backward pass" if record.backward else ""))
        elif record.kind in {"alloc", "free"}:
            own.append((replayed.turn[row], record))
    live: dict[int, int] = {}
    total = most = 0
    peak: dict[int, int] = {}
    for _, record in sorted(own, key=lambda one: one[0]):
        (block,) = record.writes
        if record.kind == "alloc":
            live[block] = -(-record.nbytes // _ROUND) * _ROUND
            total += live[block]
            if total > most:
                most, peak = total, dict(live)
        else:
            total -= live.pop(block, 0)
    blocks: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for block, size in peak.items():
        name = source.get(block, UNWRITTEN)
        blocks[name] += 1
        nbytes[name] += size
    return [Held(name, blocks[name], size) for name, size in nbytes.most_common()]
