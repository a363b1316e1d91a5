"""Schedules as data: what each device does in which order, checked before anything runs. Plain Python, no PyTorch.

    from gpipe_bench.schedules import check, drawn, named_schedule

    schedule = named_schedule("zb_h1", m=4, n=3, devices=3)
    print(drawn(schedule))
    facts = check(schedule)
    print(facts.in_flight, facts.bubble(forward=1, inputs=1, weights=1))

A schedule of one's own is a list of ``(kind, micro-batch, partition)`` for each device: ``check`` takes it as it is.
"""

from __future__ import annotations

from gpipe_bench.schedules.actions import KINDS, Action, MessageEnd, Schedule, with_recomputation
from gpipe_bench.schedules.check import Facts, check
from gpipe_bench.schedules.memory import Held, in_flight, memory
from gpipe_bench.schedules.message_lists import derived, read_messages
from gpipe_bench.schedules.messages import Message, with_messages
from gpipe_bench.schedules.moves import exchanged, moved, reach
from gpipe_bench.schedules.order import merged_order
from gpipe_bench.schedules.progress import CHANNELS, stuck
from gpipe_bench.schedules.search import searched
from gpipe_bench.schedules.table import SCHEDULES, named_schedule
from gpipe_bench.schedules.timing import Durations, Timing, drawn, timing
from gpipe_bench.schedules.torch_csv import read_csv, to_csv

__all__ = [
    "CHANNELS",
    "KINDS",
    "SCHEDULES",
    "Action",
    "Durations",
    "Facts",
    "Held",
    "Message",
    "MessageEnd",
    "Schedule",
    "Timing",
    "check",
    "derived",
    "drawn",
    "exchanged",
    "in_flight",
    "memory",
    "merged_order",
    "moved",
    "named_schedule",
    "reach",
    "read_csv",
    "read_messages",
    "searched",
    "stuck",
    "timing",
    "to_csv",
    "with_messages",
    "with_recomputation",
]
