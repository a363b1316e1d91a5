"""A network in virtual time: all ranks are threads of this process, one of which runs at a time.

It takes the place of ``torch.distributed`` beneath the real engine (see :mod:`gpipe_bench.distributed.network`). When
no rank can run, time passes until the next event: a message arrives, a wait has lasted too long, a rank is killed. All
that is left to chance is drawn from one seed: which rank is next, how long it computes, how long a message travels. So
equal seeds give equal logs, and nothing depends on how fast this machine is.

As over gloo, a message travels once both ends are posted, messages between two ranks arrive in order, and a wait that
takes too long closes all connections of its rank in that context. A rank that ends or is killed closes all of its own,
which the others notice after what it has sent. A link that is cut loses everything.

Left out are NCCL, GPUs, meshes and the collectives of ``torch.distributed.checkpoint``; parts of messages, their size
and collectives that end in part on a rank; threads, sockets, ports, a slow store and clocks that differ; and kills and
interrupts elsewhere than in a layer or in a use of the network.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

import torch
import torch.distributed as dist

PATIENCE_S = 20.0
"""How long a wait without a time-out of its own lasts, where nothing else is said."""


class KilledError(BaseException):
    """Ends the thread of a rank that was killed."""


class HangError(BaseException):
    """Nothing will ever happen any more, and yet a rank waits."""


class Waiter:
    """A thread that waits, and for what."""

    def __init__(self, rank: int | None, until: Callable[[], Any]) -> None:
        self.rank, self.until, self.expired, self.baton = rank, until, False, threading.Semaphore(0)


class World:
    """What all ranks share.

    Args:
        size: how many ranks there are.
        seed: of everything that is drawn.
        unit_s: a message travels for some of these, and a rank computes for a part of one before it uses the network.
        keeper: the rank that keeps the store, which is gone with it; None: nobody's.

    Attributes:
        now_s: virtual time.
        log: what has happened, as lines.
        operations: how often each rank has used the network.
        sent_bytes: what each rank has sent.
        watch: called with a rank before each of these.
        wrong: what no engine may do, and some rank did.
    """

    def __init__(self, size: int, seed: int = 0, unit_s: float = 1e-3, keeper: int | None = None) -> None:
        self.size, self.unit_s, self.keeper = size, unit_s, keeper
        self.draw = random.Random(seed)
        self.now_s = 0.0
        self.log: list[str] = []
        self.operations, self.sent_bytes = [0] * size, [0] * size
        self.watch: Callable[[int], None] = lambda rank: None
        self.wrong: list[str] = []
        self.contexts: dict[tuple[str, str], Context] = {}
        self.keys: set[str] = set()
        self.dead: set[int] = set()
        self.ended: set[int] = set()
        self.hung = False
        # Two ranks have no link from the first time on, until the second one.
        self._cuts: dict[frozenset[int], tuple[float, float]] = {}
        # When, a number, what happens, and the waiter that it is for, if there is one.
        self._events: list[tuple[float, int, Callable[[], None], Waiter | None]] = []
        self._numbers = count()
        self._waiters: list[Waiter] = []

    # --- events and threads ------------------------------------------------------------------------------------------

    def after(self, seconds: float, job: Callable[[], None], waiter: Waiter | None = None) -> None:
        """Do something later, unless a waiter that it is for has ceased to wait: then no time passes."""
        heappush(self._events, (self.now_s + seconds, next(self._numbers), job, waiter))

    def note(self, *words: object) -> None:
        """Add a line to the log."""
        self.log.append(f"{self.now_s:.9f} {' '.join(map(str, words))}")

    def operate(self, rank: int, *words: object) -> None:
        """A rank uses the network: before that it has computed for a while."""
        self.operations[rank] += 1
        if rank not in self.dead:
            self.watch(rank)
            if threading.current_thread().name == f"rank-{rank}" and self.draw.random() < 0.5:
                self.pause(rank, self.draw.random() * self.unit_s)
        self.living(rank)
        self.note(f"rank {rank}", *words)

    def living(self, rank: int) -> None:
        """End the thread of a rank that was killed."""
        if rank in self.dead:
            raise KilledError
        if self.hung:
            raise HangError

    def pause(self, rank: int, seconds: float) -> None:
        """Let a rank do nothing for a while."""
        self.wait(rank, lambda: False, seconds)

    def wait(self, rank: int | None, until: Callable[[], Any], seconds: float) -> bool:
        """Let a rank, or this thread, wait so long at the most; whether what it waits for is there."""
        if until():
            return True
        waiter = Waiter(rank, until)

        def expire() -> None:
            waiter.expired = True

        if seconds < inf:
            self.after(seconds, expire, waiter)
        self._waiters.append(waiter)
        self._run_until(waiter)
        if rank is not None:
            self.living(rank)
        elif self.hung:
            raise HangError
        return bool(until())

    def settle(self) -> None:
        """Let everything happen that will happen by itself."""
        while self._events:
            self._step()

    def _step(self) -> None:
        time_s, _, job, waiter = heappop(self._events)
        if waiter is None or waiter in self._waiters:
            self.now_s = time_s
            job()

    def _run_until(self, waiter: Waiter | None) -> None:
        """Let other threads run, until it is the turn of this one; None: it ends."""
        while True:
            ready = [each for each in self._waiters if self._is_ready(each)]
            if ready:
                chosen = self.draw.choice(ready)
                self._waiters.remove(chosen)
                if chosen is waiter:
                    return
                # Each rank has a default generator of its own, as a process has.
                state = torch.get_rng_state() if waiter else None
                chosen.baton.release()
                if waiter is not None and state is not None:
                    waiter.baton.acquire()
                    torch.set_rng_state(state)
                return
            if self._events:
                self._step()
            else:
                self.hung = True

    def _is_ready(self, waiter: Waiter) -> bool:
        return waiter.expired or waiter.until() or self.hung or waiter.rank in self.dead

    def run(self, job: Callable[[Any], Any], late_s: float = 0.0) -> list[Any]:
        """What ``job`` gives or raises on each rank, which begins within some time."""
        results: list[Any] = [None] * self.size

        def body(rank: int, waiter: Waiter) -> None:
            waiter.baton.acquire()
            torch.manual_seed(0)
            try:
                self.living(rank)
                results[rank] = job(VirtualNetwork(self, range(self.size), rank))
            except BaseException as error:  # noqa: BLE001 - it is a result
                results[rank] = error
            self.ended.add(rank)
            self.note(f"rank {rank} ends with", type(results[rank]).__name__)
            self.exit(rank)
            self._run_until(None)

        threads = []
        for rank in range(self.size):
            waiter = Waiter(rank, lambda: False)
            self._waiters.append(waiter)
            self.after(self.draw.random() * late_s, lambda waiter=waiter: setattr(waiter, "expired", True))
            threads.append(threading.Thread(target=body, args=(rank, waiter), name=f"rank-{rank}", daemon=True))
            threads[-1].start()
        try:
            self.wait(None, lambda: len(self.ended) == self.size, inf)
        finally:
            for thread in threads:
                thread.join()
        return results

    # --- failures ----------------------------------------------------------------------------------------------------

    def kill(self, rank: int) -> None:
        """End a rank as it stands."""
        if rank not in self.ended | self.dead:
            self.note(f"rank {rank} is killed")
            self.dead.add(rank)
            self.exit(rank)

    def exit(self, rank: int) -> None:
        """Close all connections of a rank that has ended."""
        for context in [*self.contexts.values()]:
            context.close(rank)

    def cut(self, some: Sequence[int], others: Sequence[int], seconds: float = inf) -> None:
        """Let nothing pass between some ranks and others for a while."""
        self.note(f"ranks {[*some]} and {[*others]} have no link")
        for one in some:
            for other in others:
                self._cuts[frozenset((one, other))] = self.now_s, self.now_s + seconds
        if seconds < inf:
            self.after(seconds, lambda: [context.match_all() for context in self.contexts.values()] and None)

    def held_until(self, one: int, other: int) -> float:
        """When there is a link between two ranks; now, later or never."""
        _, end_s = self._cuts.get(frozenset((one, other)), (0.0, 0.0))
        return max(self.now_s, end_s)

    def latency_s(self) -> float:
        """Of a message: mostly short, and now and then long."""
        return self.unit_s * self.draw.choice((0.0, 0.1, 1.0, 10.0)) * self.draw.random()


class Context:
    """Connections of their own between some ranks, as those of a ``ProcessGroupGloo``."""

    def __init__(self, world: World, name: str, members: Sequence[int], timeout_s: float = PATIENCE_S) -> None:
        self.world, self.name, self.members, self.timeout_s = world, name, members, timeout_s
        self.joined: set[int] = set()
        self.closed: set[int] = set()
        # What each rank knows: (rank, one that has closed its connections).
        self.gone: set[tuple[int, int]] = set()
        self._sent: defaultdict[tuple[int, int, int], deque[Transfer]] = defaultdict(deque)
        self._awaited: defaultdict[tuple[int, int, int], deque[Transfer]] = defaultdict(deque)
        self._last_s: defaultdict[tuple[str, int, int], float] = defaultdict(float)
        self._collectives: list[Collective] = []
        self._begun: defaultdict[int, int] = defaultdict(int)

    def group(self, rank: int) -> VirtualGroup:
        """As one rank has it."""
        return VirtualGroup(self, rank)

    def is_broken(self, rank: int, peer: int) -> bool:
        """Whether a rank knows that it has no connection to another one."""
        return rank in self.closed or (rank, peer) in self.gone

    def close(self, rank: int) -> None:
        """Close the connections of a rank; the others notice it after all that it has sent."""
        if rank in self.closed or rank not in self.members:
            return
        self.closed.add(rank)
        for peer in self.members:
            if peer != rank:
                self._later("arrival", rank, peer, lambda peer=peer: self.gone.add((peer, rank)))

    def begin(self, transfer: Transfer) -> None:
        """Post one end of a transfer."""
        if self.is_broken(transfer.rank, transfer.peer):
            raise RuntimeError(f"Connection closed by peer [rank {transfer.peer}]")
        (self._sent if transfer.sends else self._awaited)[transfer.way].append(transfer)
        self._match(transfer.way)

    def match_all(self) -> None:
        """Let what was held up by a link go on."""
        for way in [*self._sent]:
            self._match(way)

    def _match(self, way: tuple[int, int, int]) -> None:
        source, target, _ = way
        while self._sent[way] and self._awaited[way] and self.world.held_until(source, target) == self.world.now_s:
            sent, received = self._sent[way].popleft(), self._awaited[way].popleft()
            self._later("departure", source, target, lambda ends=(sent, received): self._leave(*ends))

    def _leave(self, sent: Transfer, received: Transfer) -> None:
        if sent.rank in self.closed:
            return
        memory = sent.bytes().clone()
        sent.done = True

        def arrive() -> None:
            if received.rank in self.closed:
                return
            if len(memory) > received.bytes().numel():
                self.world.wrong.append(f"{len(memory)} bytes on {received.way} for {received.bytes().numel()}")
            received.bytes()[: len(memory)].copy_(memory[: received.bytes().numel()])
            received.done = True

        self._later("arrival", sent.rank, sent.peer, arrive)

    def _later(self, what: str, source: int, target: int, job: Callable[[], None]) -> None:
        """Do something after what was to be done before between two ranks, unless the link is cut."""
        world, key = self.world, (what, source, target)
        time_s = max(world.held_until(source, target) + world.latency_s(), self._last_s[key])
        self._last_s[key] = time_s

        def unless_cut() -> None:
            if world.held_until(source, target) == world.now_s:
                job()
            else:
                self._later(what, source, target, job)

        if time_s < inf:
            world.after(time_s - world.now_s, unless_cut)

    def collective(self, rank: int, kind: str, tensor: torch.Tensor) -> Part:
        """Begin the next collective of a rank."""
        self.world.operate(rank, kind, self.name, tensor.nbytes)
        if rank in self.closed:
            raise RuntimeError("Connection closed by peer")
        number = self._begun[rank]
        self._begun[rank] += 1
        if number == len(self._collectives):
            self._collectives.append(Collective(self, kind))
        return self._collectives[number].join(rank, kind, tensor)


class Transfer:
    """A send or a receive on its way."""

    def __init__(self, context: Context, rank: int, peer: int, tag: int, tensor: torch.Tensor, *, sends: bool) -> None:
        self.context, self.rank, self.peer, self.tensor, self.sends = context, rank, peer, tensor, sends
        self.way = (rank, peer, tag) if sends else (peer, rank, tag)
        self.done = False

    def bytes(self) -> torch.Tensor:
        return self.tensor.detach().flatten().view(torch.uint8)

    def wait(self, timeout: timedelta | None = None) -> None:
        world, context = self.context.world, self.context
        world.operate(self.rank, "waits on", context.name, self.way)
        seconds = context.timeout_s if timeout is None else timeout.total_seconds()
        world.wait(self.rank, lambda: self.done or context.is_broken(self.rank, self.peer), seconds)
        if self.done:
            return
        if context.is_broken(self.rank, self.peer):
            raise RuntimeError(f"Connection closed by peer [rank {self.peer}]")
        world.note(f"rank {self.rank} has waited too long on", context.name, self.way)
        context.close(self.rank)
        raise RuntimeError(f"Timed out waiting {seconds * 1000:.0f}ms for rank {self.peer}")


class Collective:
    """A collective: it begins when all ranks of its context are there, and ends for each of them by itself."""

    def __init__(self, context: Context, kind: str) -> None:
        self._context, self._kind = context, kind
        self.parts: dict[int, Part] = {}

    def join(self, rank: int, kind: str, tensor: torch.Tensor) -> Part:
        context, first = self._context, next(iter(self.parts.values()), None)
        part = self.parts[rank] = Part(self, context, rank, tensor)
        if first is not None and (kind, tensor.shape, tensor.dtype) != (
            self._kind,
            first.tensor.shape,
            first.tensor.dtype,
        ):
            context.world.wrong.append(
                f"{kind} of {tensor.shape} on rank {rank} meets {self._kind} of {first.tensor.shape}"
            )
        elif len(self.parts) == len(context.members) and not context.closed:
            parts = [self.parts[member] for member in context.members]
            total = parts[0].tensor.clone()
            for each in parts[1:] if kind == "allreduce" else ():
                total += each.tensor
            for each in parts:
                context.world.after(context.world.latency_s(), lambda each=each: each.end(total))
        return part


class Part:
    """A collective as one rank has it. It gives up by itself."""

    def __init__(self, whole: Collective, context: Context, rank: int, tensor: torch.Tensor) -> None:
        self.whole, self.context, self.rank, self.tensor, self.done = whole, context, rank, tensor, False
        self._end_s = context.world.now_s + context.timeout_s

    def end(self, total: torch.Tensor) -> None:
        if not self.is_broken():
            self.tensor.copy_(total)
            self.done = True

    def is_broken(self) -> bool:
        """Whether a rank that has not done its part is known to be gone."""
        parts = self.whole.parts
        left = [peer for peer in self.context.members if peer not in parts or not parts[peer].done]
        return any(self.context.is_broken(self.rank, peer) for peer in left if peer != self.rank) or (
            self.rank in self.context.closed
        )

    def wait(self) -> None:
        world = self.context.world
        world.operate(self.rank, "waits for all on", self.context.name)
        world.wait(self.rank, lambda: self.done or self.is_broken(), max(self._end_s - world.now_s, 0.0))
        if self.done:
            return
        if self.is_broken():
            raise RuntimeError("Connection closed by peer")
        self.context.close(self.rank)
        raise RuntimeError(f"Timed out waiting {self.context.timeout_s * 1000:.0f}ms for all")


class VirtualGroup:
    """The connections of one rank."""

    def __init__(self, context: Context, rank: int) -> None:
        self._context, self._rank = context, rank

    def rank(self) -> int:
        return self._context.members.index(self._rank)

    def size(self) -> int:
        return len(self._context.members)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._begun(tensors[0], rank, tag, sends=True)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._begun(tensors[0], rank, tag, sends=False)

    def allreduce(self, tensors: list[torch.Tensor]) -> Part:
        return self._context.collective(self._rank, "allreduce", tensors[0])

    def broadcast(self, tensor: torch.Tensor, root: int) -> Part:
        assert root == 0
        return self._context.collective(self._rank, "broadcast", tensor)

    def _begun(self, tensor: torch.Tensor, rank: int, tag: int, *, sends: bool) -> Transfer:
        transfer = Transfer(self._context, self._rank, self._context.members[rank], tag, tensor, sends=sends)
        words = "sends" if sends else "awaits", self._context.name, transfer.way, tensor.nbytes
        self._context.world.operate(self._rank, *words)
        self._context.begin(transfer)
        self._context.world.sent_bytes[self._rank] += tensor.nbytes * sends
        return transfer


class VirtualStore:
    """A store as one rank has it."""

    def __init__(self, world: World, rank: int, prefix: str) -> None:
        self.world, self.rank, self.prefix = world, rank, prefix

    def set(self, key: str, value: str) -> None:
        self._use("leaves", key)
        self.world.keys.add(f"{self.prefix}/{key}")

    def check(self, keys: list[str]) -> bool:
        self._use("looks for", keys)
        return {f"{self.prefix}/{key}" for key in keys} <= self.world.keys

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._use("waits for", keys)
        world, wanted = self.world, {f"{self.prefix}/{key}" for key in keys}
        there = world.wait(self.rank, lambda: self._is_gone() or wanted <= world.keys, timeout.total_seconds())
        self._use("has waited for", keys)
        if not there:
            raise dist.DistStoreError("wait timeout")

    def _is_gone(self) -> bool:
        return self.world.keeper is not None and self.world.keeper in self.world.dead | self.world.ended

    def _use(self, *words: object) -> None:
        self.world.operate(self.rank, *words)
        if self._is_gone():
            raise dist.DistNetworkError("failed to recv, got 0 bytes")


class VirtualNetwork:
    """Some ranks of a world, as one of them knows them (see :mod:`gpipe_bench.distributed.network`).

    Args:
        world: of all ranks.
        ranks: those of the group, in order.
        own: the rank that this belongs to.
    """

    def __init__(self, world: World, ranks: Sequence[int], own: int) -> None:
        self.world, self.ranks, self.own = world, ranks, own
        self._made = count()

    def rank(self) -> int:
        return self.ranks.index(self.own)

    def size(self) -> int:
        return len(self.ranks)

    def clock(self) -> float:
        return self.world.now_s

    def silence(self) -> None:
        """Do nothing until all others have ended."""
        world = self.world
        world.wait(self.own, lambda: len(world.ended | world.dead | {self.own}) == world.size, inf)

    def store(self) -> VirtualStore:
        return VirtualStore(self.world, self.own, f"{[*self.ranks]}/{next(self._made)}")

    def has_nccl(self, device: torch.device) -> bool:
        return False

    def connected(self, way: str, store: VirtualStore, timeout: timedelta, *, nccl: bool = False) -> Any:
        assert not nccl
        world, seconds = self.world, timeout.total_seconds()
        context = world.contexts.setdefault((store.prefix, way), Context(world, way, self.ranks, seconds))
        world.operate(self.own, "connects to", way, [*self.ranks])
        context.joined.add(self.own)
        if context.joined & (world.dead | world.ended):
            raise RuntimeError("Connection refused")
        if not world.wait(self.own, lambda: len(context.joined) == len(self.ranks), seconds):
            context.close(self.own)
            raise RuntimeError("Connect timeout")
        return context.group(self.own)


def grid_of(network: VirtualNetwork, ranks: int) -> dict[str, VirtualNetwork]:
    """The groups of a rank of a grid, in whose rows are pipelines of some ranks, and in whose columns replicas."""
    world, own = network.world, network.own
    row, column = divmod(own, ranks)
    return {
        "group": VirtualNetwork(world, range(row * ranks, (row + 1) * ranks), own),
        "replicas": VirtualNetwork(world, range(column, world.size, ranks), own),
    }


def run_ranks(size: int, job: Callable[[VirtualNetwork], Any], world: World | None = None) -> list[Any]:
    """What ``job`` gives or raises on each rank."""
    return (world or World(size)).run(job)


def results_of(size: int, job: Callable[[VirtualNetwork], Any]) -> list[Any]:
    """As :func:`run_ranks`; raises what a rank has raised."""
    results = run_ranks(size, job)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
