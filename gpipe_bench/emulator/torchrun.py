"""An unchanged ``torchrun`` script on virtual devices: a process for each rank, one clock for all of them.

    rank 0: script ── trace ─┐
    rank 1: script ── trace ─┼─> one trace, whose messages are meetings ──> replay ──> steps, memory, hangs by rank
    ...                      ┘

The k-th send of a rank to another one in a group meets the k-th receive there, the k-th collective of a kind that of
the other ranks. A message between two devices takes what a copy between them takes; a collective what a ring takes.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from gpipe_bench.emulator.clocks import Clocks
from gpipe_bench.emulator.process_group import DEFAULT_GROUP, Part
from gpipe_bench.emulator.races import Race, find_rank_races
from gpipe_bench.emulator.rank import RankTrace
from gpipe_bench.emulator.script import step_ends
from gpipe_bench.errors import ConfigError, TraceError
from gpipe_bench.machine.hardware import HardwareMachine
from gpipe_bench.machine.networks import NETWORK, machine_of
from gpipe_bench.machine.profile import Link, Profile
from gpipe_bench.machine.replay import Replay, Replayed
from gpipe_bench.machine.trace import KINDS, ROW_TYPE, Record, Row, Trace

_MEET, _MARK, _RECORD, _WAIT = (KINDS.index(kind) for kind in ("meet", "mark", "record", "wait"))
_WORK: Final = [KINDS.index(kind) for kind in ("kernel", "copy", "meet")]
_POLL_S: Final = 0.05
_SHARED: Final = ("version", "pass")


@dataclass(frozen=True, slots=True)
class Message:
    """Parts that meet.

    Attributes:
        kind: ``message`` between two ranks, or the collective.
        parts: those that came.
        wanted: how many there must be.
    """

    kind: str
    parts: tuple[Part, ...]
    wanted: int

    @property
    def absent(self) -> list[int]:
        """Ranks that never issue their part."""
        first = self.parts[0]
        expected = {first.rank, first.peer} if self.kind == "message" else set(first.ranks)
        return sorted(expected - {part.rank for part in self.parts})


@dataclass(frozen=True, slots=True)
class RanksRun:
    """The run of a script on several ranks.

    Attributes:
        records: of all ranks, one after the other.
        replayed: when they ran.
        starts: the first row of each rank, and the end.
        step_ends_ns: of each rank, when everything that it had issued until the end of each step had ended.
        hangs: what ranks wait for in vain, a line each; empty if the script ends.
        races: accesses that nothing orders, rank by rank, if they were asked for.
        lines: row -> line of Python.
    """

    records: list[Record]
    replayed: Replayed
    starts: list[int]
    step_ends_ns: list[list[int]]
    hangs: list[str]
    races: list[Race]
    lines: dict[int, str]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.starts) - 1

    @property
    def step_times_ms(self) -> list[float]:
        """From the end of a step on all ranks to that of the next one."""
        return [(end - begin) / 1e6 for begin, end in pairwise(self.common_ends_ns)]

    @property
    def common_ends_ns(self) -> list[int]:
        """When a step had ended on all ranks, for the steps that all have."""
        return [max(ends) for ends in zip(*self.step_ends_ns, strict=False)]


def run_ranks(
    script: Path,
    arguments: Sequence[str],
    *,
    ranks: int,
    profile: Profile,
    races: bool,
    host_time: bool,
    hosts: int = 1,
    network: str | Link = NETWORK,
    timeout_s: float = 1800,
) -> RanksRun:
    """Run a script once on each rank, each with its device ``LOCAL_RANK``, and replay them together.

    Args:
        script: a Python file for ``torchrun``.
        arguments: of the script.
        ranks: how many processes.
        profile: hardware of each device.
        races: whether to look for accesses that nothing orders, on any rank.
        host_time: whether launches take the host time.
        hosts: that have the ranks, as many each, host after host.
        network: between hosts: a link, or a name of one in ``machine/networks.yaml`` or the profile.
        timeout_s: seconds of this machine after which ranks that still run are ended.

    Raises:
        ConfigError: there is no such file or network, hosts do not divide the ranks, or a rank uses a device of another
            one.
        TraceError: a rank failed or did not end; its own words are on stderr.
    """
    if not script.is_file():
        raise ConfigError([f"script must be a Python file, got {str(script)!r}; check the path"])
    machine = machine_of(profile, hosts=hosts, devices=ranks, network=network)
    with TemporaryDirectory() as folder:
        left = _recorded(script, arguments, (ranks, ranks // hosts), profile, races, timeout_s, Path(folder))
    trace, starts, messages = merged(left, ranks // hosts)
    # Each process has an interpreter of its own.
    machine.lock_permille = 0
    price(trace, messages, machine)
    made = Replay(trace, machine, host_time=host_time)
    wrong = unequal(messages)
    try:
        made.run()
        hangs = _waiting_on_host(messages) if any(rank.stopped for rank in left) else []
    except TraceError:
        hangs = waiting(made.rows(), messages)
        if not hangs:
            raise
    replayed = made.rows()
    records = trace.records
    own = [slice(*ends) for ends in pairwise(starts)]
    ends = [_ends(replayed, part) for part in own]
    mains = np.cumsum([0, *(_threads(rank) for rank in left)])
    steps = [step_ends(records[part], ends[rank], int(mains[rank]) + left[rank].main) for rank, part in enumerate(own)]
    ranked = [records[part] for part in own]
    clocks = Clocks(ranked, [one.on_host for one in left])
    found = find_rank_races(ranked, clocks) if races else []
    lines = {row + starts[rank]: line for rank, one in enumerate(left) for row, line in one.lines.items()}
    lines |= {part.row: part.line for message in messages for part in message.parts}
    hangs = hangs or _stuck(clocks, lines, starts)
    unread = {rank: one.unread for rank, one in enumerate(left) if one.unread}
    if unread and not hangs:
        sys.stderr.write("".join(unread.values()))
        raise TraceError(_ended_badly(dict.fromkeys(unread, 1)))
    return RanksRun(records, replayed, starts, steps, [*wrong, *hangs], found, lines)


# --- processes --------------------------------------------------------------------------------------------------------


def _recorded(  # noqa: PLR0917 - as run_ranks, and where files go
    script: Path,
    arguments: Sequence[str],
    counts: tuple[int, int],
    profile: Profile,
    races: bool,
    timeout_s: float,
    folder: Path,
) -> list[RankTrace]:
    """What each rank leaves; ``counts``: all ranks, and those of a host."""
    from torch._C._distributed_c10d import TCPStore

    from gpipe_bench.emulator.build import built

    built()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # As torchrun's agent: the store outlives each rank.
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    ranks, local = counts
    count = str(ranks)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_WORLD_SIZE": str(ranks // local),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": count,
        "TORCHELASTIC_RUN_ID": "emulated",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    (folder / "profile").write_bytes(pickle.dumps(profile))
    own = [sys.executable, "-m", "gpipe_bench.emulator.rank"]
    processes = []
    for rank in range(ranks):
        words = [str(folder / str(rank)), str(folder / "profile"), "races" if races else "none", str(script)]
        numbers = {"RANK": str(rank), "ROLE_RANK": str(rank)}
        numbers |= {"LOCAL_RANK": str(rank % local), "GROUP_RANK": str(rank // local)}
        environment = {**os.environ, **shared, **numbers}
        processes.append(subprocess.Popen([*own, *words, *arguments], env=environment))
    try:
        _await(processes, timeout_s, folder)
    finally:
        ended = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        del store
    left = {rank for rank in range(ranks) if (folder / str(rank)).exists()}
    failed = {rank: status for rank, status in enumerate(ended) if status or (status == 0 and rank not in left)}
    if failed:
        raise TraceError(_ended_badly(failed))
    if None in ended:
        running = ", ".join(str(rank) for rank, status in enumerate(ended) if status is None)
        raise TraceError(f"all ranks must end within {timeout_s:g} s, got rank {running} still at work")
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(ranks)]  # noqa: S301 - as above


def _await(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float, folder: Path) -> None:
    """Wait for all; where one fails, or leaves no trace, the others have no more than a few seconds."""
    end = time.monotonic() + timeout_s
    failed = False
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        ended = ((rank, process.poll()) for rank, process in enumerate(processes))
        if not failed and any(
            status or (status is not None and not (folder / str(rank)).exists()) for rank, status in ended
        ):
            failed, end = True, min(end, time.monotonic() + 5)
        time.sleep(_POLL_S)


def _ended_badly(failed: Mapping[int, int]) -> str:
    """The error that names how ranks ended, by their exit status."""
    ends = (
        f"rank {rank} ({f'ended by {signal.Signals(-status).name}' if status < 0 else f'exit status {status}'})"
        for rank, status in failed.items()
    )
    return f"all ranks must end well, got an error in {', '.join(ends)}; mend the script"


# --- one trace --------------------------------------------------------------------------------------------------------


def _threads(rank: RankTrace) -> int:
    return 1 + max((int(number) for number in np.frombuffer(rank.rows, ROW_TYPE)["thread"]), default=rank.main)


def merged(left: Sequence[RankTrace], local: int) -> tuple[Trace, list[int], list[Message]]:
    """The traces of ranks after each other, with numbers that differ; where each begins; and the messages.

    A rank's device is its place among the ``local`` ranks of a host there, and its rank in the merged trace.

    Raises:
        ConfigError: a rank uses a device of another one.
    """
    rows, accesses, starts, parts = [], [], [0], []
    names: dict[str, int] = {"": 0}
    version = block = thread = access = 0
    for rank, one in enumerate(left):
        own = np.frombuffer(one.rows, ROW_TYPE).copy()
        touched = np.frombuffer(one.accesses, np.int64).reshape(-1, 3).copy()
        used = sorted(set(own["device"].tolist()) - {-1, rank % local})
        if used:
            got = f"got work of rank {rank} on device {used[0]}"
            mend = 'call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) first'
            raise ConfigError([f"a rank must use the device of its LOCAL_RANK alone, {got}; {mend}"])
        own["device"] += np.where(own["device"] >= 0, rank - rank % local, 0)
        own["name"] = np.array([names.setdefault(name, len(names)) for name in one.names], np.int32)[own["name"]]
        for field in ("first_read", "first_write", "end_write"):
            own[field] += access
        highest = {field: int(own[field].max(initial=0)) for field in (*_SHARED, "block")}
        blocks = max(highest["block"], int(touched[:, 0].max(initial=0)))
        for field, shift in (("version", version), ("pass", version), ("block", block)):
            own[field] += np.where(own[field] > 0, shift, 0)
        touched[:, 0] += block
        # Nodes say how they come before each other by a number of their own among the blocks.
        own["thread"] += thread
        access += len(touched)
        version += max(highest[field] for field in _SHARED)
        block += blocks
        thread += _threads(one)
        parts += [part_of(part, starts[-1]) for part in one.parts]
        rows.append(own)
        accesses.append(touched)
        starts.append(starts[-1] + len(own))
    trace = Trace()
    joined = np.concatenate(rows)
    trace.rows = (Row * len(joined)).from_buffer_copy(joined.tobytes()) if len(joined) else (Row * 0)()
    trace.accesses.frombytes(np.concatenate(accesses).tobytes())
    trace.names = tuple(names)
    return trace, starts, matched(parts)


def part_of(part: Part, first: int) -> Part:
    """A part with its row in the merged trace, whose rank begins at ``first``."""
    row = part.row if part.row < 0 else part.row + first
    return replace(part, row=row)


def matched(parts: Sequence[Part]) -> list[Message]:
    """The messages that parts belong to, in the order of their first parts."""
    found: defaultdict[tuple[object, ...], list[Part]] = defaultdict(list)
    for part in parts:
        way, _, rest = part.kind.partition(" ")
        if way in {"send", "recv"}:
            ends = (part.rank, part.peer) if way == "send" else (part.peer, part.rank)
            found["message", rest, part.group, ends, part.number].append(part)
        else:
            found[part.kind, part.group, part.ranks, part.number].append(part)
    return [
        Message(str(key[0]), tuple(own), 2 if key[0] == "message" else len(own[0].ranks)) for key, own in found.items()
    ]


def price(trace: Trace, messages: Sequence[Message], machine: HardwareMachine) -> None:
    """Say of the rows of messages which meeting they are of, and how long it takes."""
    for number, message in enumerate((one for one in messages if one.parts[0].row >= 0), 1):
        nbytes = max(part.nbytes for part in message.parts)
        duration = message_ns(machine, message, nbytes)
        for part in message.parts:
            row = trace.rows[part.row]
            row.meeting, row.parts, row.duration_ns = number, message.wanted, duration
            row.peer = part.peer if part.kind == "send" else -1


def message_ns(machine: HardwareMachine, message: Message, nbytes: int) -> int:
    """How long a message takes: a copy; of a collective, steps along a ring of ranks at the pace of the slowest link.

    An all-reduce of n ranks takes 2 (n - 1) steps of an n-th of the bytes; an all-gather, a reduce-scatter, a gather, a
    scatter and an all-to-all n - 1 of them; a broadcast and a reduce one of all bytes and n - 2 empty ones.
    """
    first = message.parts[0]
    if message.kind == "message":
        ends = (first.rank, first.peer) if first.kind == "send" else (first.peer, first.rank)
        return machine.copy_ns(*ends, nbytes)
    ring = [*first.ranks, first.ranks[0]]
    count = len(first.ranks)
    if count == 1:
        return 0

    def step(size: int) -> int:
        return max(machine.copy_ns(*ends, size) for ends in pairwise(ring))

    if message.kind in {"broadcast", "reduce"}:
        return step(nbytes) + (count - 2) * step(0)
    return (2 if message.kind == "all_reduce" else 1) * (count - 1) * step(-(-nbytes // count))


# --- what is wrong ----------------------------------------------------------------------------------------------------


def unequal(messages: Sequence[Message]) -> list[str]:
    """Messages whose parts differ in size, type, reduction or root; ranks may give any size to an all-to-all."""
    found = []
    for message in messages:
        sizes = [f"{part.nbytes} bytes" for part in message.parts]
        for what, got in ("sizes", sizes), ("terms", [part.terms for part in message.parts]):
            any_size = what == "sizes" and message.kind == "all_to_all"
            if len(set(got)) > 1 and not any_size:
                found.append(f"{_said(message)}: {what} must be equal, got {' and '.join(got)}")
    return found


def waiting(replayed: Replayed, messages: Sequence[Message]) -> list[str]:
    """What ranks wait for in vain: the first part on each of their streams that never ran, and those of the CPU."""
    heads: dict[tuple[int, int], tuple[Part, Message]] = {}
    for message in messages:
        for part in message.parts:
            if part.row < 0 or not replayed.turn[part.row] or replayed.end_ns[part.row] >= 0:
                continue
            queue = part.rank, replayed.trace.rows[part.row].stream
            if queue not in heads or part.row < heads[queue][0].row:
                heads[queue] = part, message
    return [
        *(_waits(part, message) for part, message in heads.values() if not _held_up(replayed, part)),
        *_waiting_on_host(messages),
    ]


def _held_up(replayed: Replayed, part: Part) -> bool:
    """Whether the stream of a part waits for work that never ran, so that the part does not even begin."""
    table = replayed.trace.table
    never = np.isin(table["kind"], _WORK) & (np.array(replayed.end_ns) < 0)

    def stream_until(row: int) -> Any:
        return np.all([table[name][:row] == table[name][row] for name in ("device", "stream")], axis=0)

    waits = stream_until(part.row) & (table["kind"][: part.row] == _WAIT)
    awaited = (table["kind"] == _RECORD) & np.isin(table["version"], table["version"][: part.row][waits])
    return any((never[:row] & stream_until(row)).any() for row in np.flatnonzero(awaited).tolist())


def _stuck(clocks: Clocks, lines: dict[int, str], starts: Sequence[int]) -> list[str]:
    """Hosts that wait for ever; the replay orders devices alone."""
    found = []
    for rank, (row, message) in sorted(clocks.stuck.items()):
        before = (lines[place] for place in range(starts[rank] + row - 1, starts[rank] - 1, -1) if place in lines)
        place = (
            f"at {message.line} for a message of CPU tensors"
            if message
            else f"after {next(before, 'its begin')} for its device"
        )
        found.append(f"rank {rank} waits {place}: messages of CPU and device wait for each other")
    return found


def _waiting_on_host(messages: Sequence[Message]) -> list[str]:
    """Messages of the CPU that a rank never comes to."""
    lost = [message for message in messages if message.parts[0].row < 0 and message.absent]
    return [_waits(part, message) for message in lost for part in message.parts if not part.kind.startswith("send")]


def _waits(part: Part, message: Message) -> str:
    text = f"rank {part.rank} waits at {part.line} in {_named(part)}"
    if message.absent:
        never = {"send": "receives", "recv": "sends"}.get(part.kind.split()[0], "calls")
        return f"{text}, which rank {', '.join(map(str, message.absent))} never {never}"
    others = (f"rank {one.rank} at {one.line}" for one in message.parts if one.rank != part.rank)
    return f"{text} for {', '.join(others)}"


def _named(part: Part) -> str:
    number = f"no. {part.number + 1}" + (f" of group {part.group}" if part.group != DEFAULT_GROUP else "")
    if part.peer < 0:
        return f"{part.kind} {number}"
    return f"{part.kind} {number} {'to' if part.kind.startswith('send') else 'from'} rank {part.peer}"


def _said(message: Message) -> str:
    return "; ".join(f"rank {part.rank} at {part.line}: {_named(part)}" for part in message.parts)


def _ends(replayed: Replayed, part: slice) -> list[int]:
    """When each row of a rank ended; a mark when its thread came to it, as in the replay it stands for all ranks."""
    kinds: Any = replayed.trace.table["kind"][part]
    ends = np.array(replayed.end_ns[part])
    hosts = np.array(replayed.host_ns[part])
    found: list[int] = np.where(kinds == _MARK, hosts, ends).tolist()
    return found
