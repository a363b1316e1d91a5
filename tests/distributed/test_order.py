"""Processes send and take in the order that :mod:`gpipe_bench.schedules.messages` derives, and that is proven there."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch.nn import functional

from gpipe_bench import Components
from gpipe_bench.distributed import Pipe, exchange
from gpipe_bench.schedules import SCHEDULES, named_schedule, with_recomputation
from gpipe_bench.schedules.messages import Message, channels, holder
from tests.distributed.test_parity import ranks_of, read_by_all, unet
from tests.distributed.virtual import results_of


class Watched(exchange.Exchange):
    """Notes what is put into the boxes of other ranks, and what is taken that came from them."""

    def __init__(self, group, rows, skips, *arguments, **options):
        skips = dict(skips)
        super().__init__(group, rows, skips, *arguments, **options)
        self.keys, self.chains = [None, *skips], [range(len(rows)), *skips.values()]
        self.put_there, self.taken_here = defaultdict(list), defaultdict(list)

    def note(self, notes, key, other):
        if key[0] in "FB" and other != self._rank:
            notes[other].append(Message(*key[:3], None if key[3] is None else self.keys.index(key[3]) - 1))

    def put(self, key, value):
        self.note(self.put_there, key, self._ranks[key[2]] if key[0] in "FB" else self._rank)
        super().put(key, value)

    def take(self, key, place):
        way, _, j, skip = key
        if way in "FB" and (way, j, skip) != ("F", 0, None):
            chain = self.chains[self.keys.index(skip)]
            source = (
                chain[chain.index(j) + 1] if way == "B" else j - 1 if skip is None else holder(chain, j, self._ranks)
            )
            self.note(self.taken_here, key, self._ranks[source])
        return super().take(key, place)


@pytest.mark.parametrize(("model", "shared"), [(unet, True), (read_by_all, True), (read_by_all, False)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_are_sent_and_taken_in_the_order_of_the_proof(schedule, model, shared, monkeypatch):
    watched = {}

    def watch(*arguments, **options):
        made = Watched(*arguments, **options)
        watched[made._rank] = made
        return made

    monkeypatch.setattr("gpipe_bench.distributed.pipe.Exchange", watch)
    ranks = ranks_of(schedule, 4)

    def job(group):
        options = {"chunks": 5, "checkpoint": "always", "components": Components(shared=shared)}
        pipe = Pipe(model(), [2, 2, 2, 2], schedule=schedule, group=group, **options)
        pipe.step(torch.rand(5, 3).double(), torch.rand(5, 3).double(), functional.mse_loss)
        return list(pipe.skip_layout.chains(shared=shared).values())

    skips = results_of(ranks, job)[0]
    expected = channels(with_recomputation(named_schedule(schedule, 5, 4, ranks), 5), skips)
    for (source, target), channel in expected.items():
        assert watched[source].put_there[target] == [message for message, _ in channel.sent]
        assert watched[target].taken_here[source] == [message for message, _ in channel.taken]
    assert sum(len(notes.put_there) for notes in watched.values()) == len(expected)
