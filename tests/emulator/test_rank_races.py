"""Accesses of one rank may be ordered by messages through others: by what their data needs, and by no more."""

from __future__ import annotations

import itertools

import pytest

from gpipe_bench.emulator.clocks import Clocks, HostMessage
from gpipe_bench.emulator.races import find_rank_races
from gpipe_bench.machine.trace import Record

NCCL, OTHER = 7, 8
"""Streams of messages; 0 is the one that computes."""


class Ranks:
    """Records of several ranks, as a script would issue them; blocks are numbers of the test."""

    def __init__(self, count):
        self.records = [[] for _ in range(count)]
        self.on_host = [[] for _ in range(count)]
        self.versions = itertools.count(1)

    def work(self, rank, *, reads=(), writes=(), stream=0):
        self.records[rank].append(Record("kernel", "work", rank, stream, reads=tuple(reads), writes=tuple(writes)))

    def record(self, rank, stream=0):
        version = next(self.versions)
        self.records[rank].append(Record("record", "", rank, stream, version=version))
        return version

    def wait(self, rank, version, stream=0):
        self.records[rank].append(Record("wait", "", rank, stream, version=version))

    def synchronize(self, rank):
        self.records[rank].append(Record("sync_device", "", rank))

    def part(self, rank, meeting, name, *, reads=(), writes=(), parts=2, stream=NCCL, nbytes=4):
        """A part of a message after the work so far; the event that its end records."""
        self.wait(rank, self.record(rank), stream)
        self.records[rank].append(
            Record(
                "meet", name, rank, stream, nbytes=nbytes, reads=tuple(reads), writes=tuple(writes),
                meeting=meeting, parts=parts,
            )
        )  # fmt: skip
        return self.record(rank, stream)

    def send(self, rank, meeting, block, stream=NCCL):
        return self.part(rank, meeting, "send", reads=[block], stream=stream)

    def recv(self, rank, meeting, block, stream=NCCL):
        return self.part(rank, meeting, "recv", writes=[block], stream=stream)

    def tell(self, rank, key):
        self.on_host[rank].append(HostMessage(len(self.records[rank]), key, gives=True))

    def hear(self, rank, key):
        self.on_host[rank].append(HostMessage(len(self.records[rank]), key, gives=False))

    def races(self):
        """Kind, names and rank of each."""
        found = find_rank_races(self.records, Clocks(self.records, self.on_host))
        assert all(race.before.device == race.after.device for race in found)
        return [(race.kind, race.before.name, race.after.name, race.after.device) for race in found]


@pytest.mark.parametrize(("waits", "races"), [(True, []), (False, [("write", "send", "work", 0)])])
def test_an_answer_says_that_the_question_was_read_if_the_other_rank_waited_for_it(waits, races):
    ranks = Ranks(2)
    ranks.send(0, 1, 10)
    ranks.wait(0, ranks.recv(0, 2, 11, OTHER))
    ranks.work(0, writes=[10])
    arrived = ranks.recv(1, 1, 20)
    if waits:
        ranks.wait(1, arrived)
    ranks.send(1, 2, 21, OTHER)
    assert ranks.races() == races


def test_an_answer_nobody_waits_for_orders_nothing():
    ranks = Ranks(2)
    ranks.send(0, 1, 10)
    ranks.recv(0, 2, 11, OTHER)
    ranks.work(0, writes=[10])
    ranks.wait(1, ranks.recv(1, 1, 20))
    ranks.send(1, 2, 21, OTHER)
    assert ranks.races() == [("write", "send", "work", 0)]


@pytest.mark.parametrize("missing", [None, 1, 2, 0])
def test_the_order_goes_round_three_ranks_unless_one_of_them_does_not_wait(missing):
    ranks = Ranks(3)
    ranks.send(0, 1, 10)
    for rank in (1, 2):
        arrived = ranks.recv(rank, rank, 10 * rank + 10)
        if missing != rank:
            ranks.wait(rank, arrived)
        ranks.send(rank, rank + 1, 10 * rank + 11, OTHER)
    arrived = ranks.recv(0, 3, 11, OTHER)
    if missing != 0:
        ranks.wait(0, arrived)
    ranks.work(0, writes=[10])
    assert ranks.races() == ([] if missing is None else [("write", "send", "work", 0)])


def test_ranks_may_be_given_in_an_order_in_which_answers_come_first():
    ranks = Ranks(2)
    for step in range(3):
        ranks.wait(0, ranks.recv(0, 2 * step + 1, 11, OTHER))
        ranks.send(0, 2 * step + 2, 10)
        ranks.send(1, 2 * step + 1, 20, OTHER)
        ranks.wait(1, ranks.recv(1, 2 * step + 2, 21))
        ranks.work(1, writes=[20])
    assert ranks.races() == []


def test_the_data_of_an_answer_may_overwrite_the_question():
    ranks = Ranks(2)
    ranks.send(0, 1, 10)
    ranks.recv(0, 2, 10, OTHER)
    ranks.wait(1, ranks.recv(1, 1, 20))
    ranks.send(1, 2, 20, OTHER)
    assert ranks.races() == []


def test_a_send_may_end_before_its_receive_begins():
    """Rank 1 reads 20 aside, then receives; that rank 0's send is over does not say that rank 1 has come to it."""
    ranks = Ranks(2)
    ranks.wait(0, ranks.send(0, 1, 10))
    ranks.send(0, 2, 11, OTHER)
    ranks.work(1, reads=[20], stream=NCCL)
    ranks.recv(1, 1, 21)
    ranks.wait(1, ranks.recv(1, 2, 22, OTHER))
    ranks.work(1, writes=[20])
    assert ranks.races() == [("write", "work", "work", 1)]


def known(name, **options):
    """Pairs of ranks: the end of the collective on the first says that the second has come to it."""
    found = set()
    for ahead, behind in itertools.permutations(range(3), 2):
        ranks = Ranks(3)
        for rank in range(3):
            reads = [10 * rank] * (rank in options.get("given", range(3)))
            writes = [10 * rank + 1] * (rank in options.get("taken", range(3)))
            if rank == behind:
                # Work before the collective, which only the other rank's message orders with what comes after it.
                ranks.work(rank, reads=[99], stream=NCCL)
            done = ranks.part(rank, 1, name, reads=reads, writes=writes, parts=3, nbytes=options.get("nbytes", 4))
            if rank == ahead:
                ranks.wait(rank, done)
                ranks.send(rank, 2, 50, OTHER)
            if rank == behind:
                ranks.wait(rank, ranks.recv(rank, 2, 60, OTHER))
                ranks.work(rank, writes=[99])
        if not ranks.races():
            found.add((ahead, behind))
    return found


ALL = set(itertools.permutations(range(3), 2))


@pytest.mark.parametrize(
    ("name", "options", "pairs"),
    [
        ("all_reduce", {}, ALL),
        ("broadcast", {"given": [0], "taken": [1, 2]}, {(1, 0), (2, 0)}),
        ("scatter", {"given": [0]}, {(1, 0), (2, 0)}),
        ("reduce_scatter", {}, ALL),
        ("gather", {"taken": [0]}, {(0, 1), (0, 2)}),
        ("reduce", {"taken": [0]}, {(0, 1), (0, 2)}),
        ("all_reduce", {"nbytes": 0}, set()),
        ("all_to_all", {}, set()),
    ],
)
def test_a_collective_orders_who_takes_data_after_who_gives_it(name, options, pairs):
    assert known(name, **options) == pairs


def test_that_another_rank_has_its_sum_does_not_say_that_this_one_is_written():
    ranks = Ranks(2)
    for rank in range(2):
        done = ranks.part(rank, 1, "all_reduce", reads=[10 * rank], writes=[10 * rank + 1])
        if rank == 1:
            ranks.wait(1, done)
            ranks.send(1, 2, 20, OTHER)
        else:
            ranks.wait(0, ranks.recv(0, 2, 9, OTHER))
            ranks.work(0, writes=[0])
            ranks.work(0, reads=[1])
    assert ranks.races() == [("read", "all_reduce", "work", 0)]


@pytest.mark.parametrize(
    ("name", "races"), [("all_gather", []), ("reduce_scatter", [("write", "reduce_scatter", "work", 0)])]
)
def test_who_has_a_piece_does_not_know_that_the_rest_is_read(name, races):
    ranks = Ranks(2)
    for rank in range(2):
        done = ranks.part(rank, 1, name, reads=[10 * rank], writes=[10 * rank + 1])
        if rank == 1:
            ranks.wait(1, done)
            ranks.send(1, 2, 20, OTHER)
        else:
            ranks.wait(0, ranks.recv(0, 2, 9, OTHER))
            ranks.work(0, writes=[0])
    assert ranks.races() == races


@pytest.mark.parametrize(("synchronizes", "races"), [(True, []), (False, [("write", "send", "work", 0)])])
def test_messages_of_the_cpu_pass_on_what_their_host_has_waited_for(synchronizes, races):
    ranks = Ranks(2)
    ranks.send(0, 1, 10)
    ranks.hear(0, "done")
    ranks.work(0, writes=[10])
    ranks.recv(1, 1, 20)
    if synchronizes:
        ranks.synchronize(1)
    ranks.tell(1, "done")
    assert ranks.races() == races
    assert not Clocks(ranks.records, ranks.on_host).stuck


def test_a_host_knows_only_what_was_over_when_the_other_one_told():
    ranks = Ranks(2)
    ranks.send(0, 1, 10)
    ranks.hear(0, "early")
    ranks.work(0, writes=[10])
    ranks.recv(1, 1, 20)
    ranks.tell(1, "early")
    ranks.synchronize(1)
    assert ranks.races() == [("write", "send", "work", 0)]


def test_a_message_of_the_cpu_orders_no_streams_that_its_host_has_not_waited_for():
    ranks = Ranks(2)
    ranks.work(0, reads=[10], stream=OTHER)
    for rank in range(2):
        ranks.tell(rank, "barrier")
        ranks.hear(rank, "barrier")
    ranks.work(0, writes=[10])
    assert ranks.races() == [("write", "work", "work", 0)]


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("others", [0, 1])
def test_what_comes_after_a_message_that_never_ends_is_not_looked_at(host, others):
    ranks = Ranks(2)
    ranks.work(0, writes=[10], stream=OTHER)
    ranks.work(0, reads=[10])
    done, *_ = (
        ranks.part(rank, 1, "all_reduce", reads=[11 + rank], writes=[11 + rank], parts=3) for rank in range(1 + others)
    )
    if host:
        ranks.records[0].append(Record("sync_stream", "", 0, NCCL))
    else:
        ranks.wait(0, done)
    ranks.work(0, reads=[10])
    assert ranks.races() == [("read", "work", "work", 0)]


def test_an_all_reduce_may_write_before_other_ranks_come_to_it():
    ranks = Ranks(2)
    ranks.work(0, reads=[1], stream=OTHER)
    ranks.records[0].append(Record("meet", "send", 0, OTHER, nbytes=4, reads=(2,), meeting=1, parts=2))
    ranks.wait(1, ranks.recv(1, 1, 20))
    for rank in range(2):
        ranks.part(rank, 2, "all_reduce", reads=[10 * rank], writes=[10 * rank + 1])
    assert ranks.races() == [("write", "work", "all_reduce", 0)]


def test_ranks_that_wait_for_each_other_have_the_races_until_there():
    ranks = Ranks(2)
    for rank in range(2):
        ranks.work(rank, writes=[10 + rank], stream=OTHER)
        ranks.work(rank, reads=[10 + rank])
        ranks.wait(rank, ranks.recv(rank, 1 + rank, 20 + rank))
        ranks.send(rank, 2 - rank, 20 + rank)
        ranks.work(rank, reads=[10 + rank])
    assert ranks.races() == [("read", "work", "work", 0), ("read", "work", "work", 1)]


@pytest.mark.parametrize("blocks", [True, False])
def test_a_host_that_waits_for_a_message_which_needs_its_own_word_is_stuck(blocks):
    ranks = Ranks(2)
    ranks.recv(0, 1, 10)
    if blocks:
        ranks.synchronize(0)
    ranks.tell(0, "go")
    ranks.hear(1, "go")
    ranks.send(1, 1, 20)
    ranks.synchronize(1)
    stuck = {0: (len(ranks.records[0]) - 1, None), 1: (0, HostMessage(0, "go", gives=False))}
    assert Clocks(ranks.records, ranks.on_host).stuck == (stuck if blocks else {})
