"""Random lists of messages, run by processes over gloo: ``python -m tests.distributed.random_lists --lists 0:1000``.

Each seed draws messages between two to four ranks, small and large, in an order in which all end. Then some ranks swap
neighbours, lose a message or change a tag; calls are made blocking, or joined to batches; and waits are put in between.
What comes of it is run twice: by ``schedule check --channels gloo``, and by processes. They must agree on which ranks
are stuck, and in which call; and each receive must get the message that it is said to get.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_bench.schedules import read_messages, stuck
from tests.distributed.watched import shared, watched

SIZES = 0, 1, 1 << 12, 1 << 20
"""Elements of 8 bytes: the last ones are more than what sockets buffer."""
MOST = 64
"""Messages of a rank, at most."""


class Call(NamedTuple):
    """``send``, ``recv``, ``isend`` or ``irecv``."""

    name: str
    peer: int
    tag: int


Field = tuple[Call, ...] | int | None
"""A call, a batch of calls, a wait for a message by its number, or a wait for all so far."""


class Lists(NamedTuple):
    """What ranks do.

    Attributes:
        ranks: for each its fields.
        sizes: elements of the messages from a rank to a rank with a tag.
    """

    ranks: list[list[Field]]
    sizes: dict[tuple[int, int, int], int]

    def rows(self) -> list[list[str]]:
        """As a file has them. Each message has a name of its own, ``RANK.NUMBER``."""
        return [_row(rank, fields) for rank, fields in enumerate(self.ranks)]


def _row(rank: int, fields: Sequence[Field]) -> list[str]:
    row, number = [], 0
    for field in fields:
        if isinstance(field, tuple):
            texts = [f"{call.name} {call.peer} tag {call.tag} name {rank}.{k}" for k, call in enumerate(field, number)]
            number += len(field)
            row.append(f"batch({'; '.join(texts)})" if len(field) > 1 else texts[0])
        else:
            row.append("wait" if field is None else f"wait {field}")
    return row


def drawn(seed: int) -> Lists:
    """The lists of a seed."""
    draw = random.Random(seed)
    n = draw.choice((2, 3, 4))
    own: list[list[Call]] = [[] for _ in range(n)]
    for _ in range(draw.randint(3, 5 * n)):
        source, target = draw.sample(range(n), 2)
        tag = draw.choice((0, 0, 0, 1))
        own[source].append(Call("send", target, tag))
        own[target].append(Call("recv", source, tag))
    disorder, blocking = draw.choice((0.0, 0.05, 0.2)), draw.choice((0.0, 0.2, 0.6, 1.0))
    sizes = {
        (source, target, tag): draw.choices(SIZES, (1, 4, 4, 1))[0]
        for source in range(n)
        for target in range(n)
        for tag in range(3)
    }
    return Lists([_with_waits(draw, _disturbed(draw, calls, disorder), blocking) for calls in own], sizes)


def _disturbed(draw: random.Random, calls: list[Call], disorder: float) -> list[Call]:
    for k in range(len(calls) - 1):
        if draw.random() < disorder:
            calls[k : k + 2] = reversed(calls[k : k + 2])
    kept = [call for call in calls if draw.random() >= disorder / 4]
    return [call._replace(tag=2) if draw.random() < disorder / 8 else call for call in kept]


def _with_waits(draw: random.Random, calls: list[Call], blocking: float) -> list[Field]:
    """Choose which calls block or are a batch, and wait for some of the others; for all at most once."""
    fields: list[Field] = []
    pending: list[int] = []
    batch: list[Call] = []
    waits, waited_for_all = draw.choice((0.0, 0.2, 0.6)), False
    for number, call in enumerate(calls):
        if draw.random() < blocking and not batch:
            fields.append((call,))
            continue
        batch.append(call._replace(name=f"i{call.name}"))
        pending.append(number)
        if draw.random() < 0.3:
            continue
        fields.append((*batch,))
        batch = []
        while pending and draw.random() < waits:
            fields.append(pending.pop(draw.randrange(len(pending))))
        if draw.random() < waits / 6 and not waited_for_all:
            waited_for_all = True
            fields.append(None)
            pending = []
    return [*fields, (*batch,)] if batch else fields


def predicted(lists: Lists) -> tuple[dict[int, int], dict[str, str]]:
    """For each stuck rank the number of its field, and for each receive the message that it gets, by the check."""
    rows = lists.rows()
    lines = stuck(read_messages("\n".join(map(",".join, rows))), "gloo")
    where = [re.match(r"rank (\d+) is stuck at (.*?): waits for", line) for line in lines]
    gets = [re.search(r"name (\S+) gets the message of .* name (\S+) of rank", line) for line in lines]
    places = {int(one[1]): (*rows[int(one[1])], "the end of its list").index(one[2]) for one in where if one}
    return places, {one[1]: one[2] for one in gets if one}


def found(lists: Lists, folder: Path) -> tuple[dict[int, int], dict[str, str]]:
    """The same of real processes; only of receives that a process has waited for."""
    got = shared(folder / "got", len(lists.ranks) * MOST)
    got.fill_(-1)
    places = watched(len(lists.ranks), folder, _play, lists, folder)
    named = {divmod(k, MOST): divmod(value, MOST) for k, value in enumerate(got.tolist()) if value >= 0}
    return places, {"{}.{}".format(*receive): "{}.{}".format(*send) for receive, send in named.items()}


def _play(rank: int, places: Tensor, lists: Lists, folder: Path) -> None:
    """What a process does: each message has its rank and number in its elements."""
    got = shared(folder / "got", len(lists.ranks) * MOST)
    works: dict[int, Any] = {}
    buffers: list[Tensor] = []
    receives: list[bool] = []

    def waited(number: int) -> None:
        if number in works:
            works.pop(number).wait()
        if receives[number] and buffers[number].numel():
            assert buffers[number].min() == buffers[number].max()
            got[rank * MOST + number] = buffers[number][0]

    for place, field in enumerate((*lists.ranks[rank], None)):
        places[rank] = place
        if not isinstance(field, tuple):
            for number in [*works] if field is None else [field]:
                waited(number)
            continue
        first = len(buffers)
        for call in field:
            ends = (rank, call.peer) if "send" in call.name else (call.peer, rank)
            buffers.append(torch.full((lists.sizes[*ends, call.tag],), rank * MOST + len(buffers)))
            receives.append("recv" in call.name)
        if len(field) > 1:
            operations = [
                dist.P2POp(getattr(dist, call.name), buffers[k], call.peer, tag=call.tag)
                for k, call in enumerate(field, first)
            ]
            works.update(enumerate(dist.batch_isend_irecv(operations), first))
        elif field[0].name.startswith("i"):
            works[first] = getattr(dist, field[0].name)(buffers[first], field[0].peer, tag=field[0].tag)
        else:
            getattr(dist, field[0].name)(buffers[first], field[0].peer, tag=field[0].tag)
            waited(first)


def disagreement(lists: Lists, folder: Path) -> str:
    """What the check and the processes do not agree on, or an empty text."""
    (places, gets), (real_places, real_gets) = predicted(lists), found(lists, folder)
    if places != real_places:
        return f"stuck at {places} by the check, at {real_places} by processes"
    missing = {receive: send for receive, send in real_gets.items() if gets.get(receive) != send}
    return f"receives get {missing} in processes, {gets} by the check" if missing else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The status: 1 if there is a disagreement."""
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.random_lists", description=__doc__)
    parser.add_argument("--lists", metavar="FROM:TO", required=True, help="seeds, without the last one")
    first, last = map(int, parser.parse_args(arguments).lists.split(":"))
    kinds, disagreements = Counter[str](), 0
    for seed in range(first, last):
        lists = drawn(seed)
        with TemporaryDirectory() as folder:
            wrong = disagreement(lists, Path(folder))
        kinds["stuck" if predicted(lists)[0] else "end"] += 1
        if wrong:
            disagreements += 1
            print(f"python -m tests.distributed.random_lists --lists {seed}:{seed + 1}  # {wrong}", flush=True)
    total = last - first
    print(f"{total - disagreements} of {total} lists agree; {kinds['end']} end, {kinds['stuck']} are stuck")
    return int(disagreements > 0)


if __name__ == "__main__":
    sys.exit(main())
