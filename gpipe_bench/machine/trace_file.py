"""A trace as a file that a person can open: JSON Lines, a row of the trace on each line, plain or as ``.gz``.

    {"format": "gpipe_bench trace", "version": 1, "rows": 271}
    {"row": 0, "kind": "kernel", "name": "mm", "duration_ns": 81200, "device": 0, "stream": 2, "thread": 1,
     "launches": 1, "reads": [[4, 0, 4096]], "writes": [[7, 0, 1024]], "begin_ns": 12000, "end_ns": 93200}

``kind`` and the fields after it are those of :class:`~gpipe_bench.machine.trace.Record`; what a row leaves out has
the default there. ``task`` is the number of the pipeline's task that a row belongs to, with ``of`` (its kind),
``microbatch`` and ``partition``; ``launch_ends`` says when each launch of a row that has several has run, after its
start; ``adding_ns`` and ``adding_launches`` are what the row takes less if it is the first to add to ``gradients``.

The first line says how many ``rows`` follow, so that a file which was cut is refused; a file without that number is
read as it is. That of a trace with nested passes has ``latencies_ns``, too: how long their roots take to come back. It
may say what came out: ``step_ns``, how long a step takes, and ``memory``, a table for each device with the fields of
:class:`~gpipe_bench.machine.replay.DeviceMemory`. Rows of a simulated trace have no blocks, so this is all that it
knows of memory; where an allocator flushed, which keeps its device waiting, a replay of the file takes less time.

Times and lengths are nanoseconds, sizes bytes; ``reads`` and ``writes`` are blocks with the first byte and the one
after the last. ``begin_ns``, ``end_ns`` and ``host_ns`` say when the row ran, and when its thread came to it, on the
machine of a replay; a reader does not need them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpipe_bench.errors import TraceError
from gpipe_bench.machine.replay import DeviceMemory, Replayed
from gpipe_bench.machine.trace import KINDS, Row, Trace, TracedTask
from gpipe_bench.results.trace_lines import HEAD, read_lines
from gpipe_bench.util.files import write_files

_TIMES: Final = ("begin_ns", "end_ns", "host_ns")
_PLACES: Final = ("first_read", "first_write", "end_write", "first_end")
_TASK: Final = ("of", "microbatch", "partition")
_DEFAULTS: Final[dict[str, Any]] = {
    **dict.fromkeys((name for name, *_ in Row._fields_ if name not in _PLACES), 0),
    **dict.fromkeys(("device", "peer", "duration_ns"), -1),
    "name": "",
    "reads": [],
    "writes": [],
    "launch_ends": [],
}
"""Of the fields of a line, but ``row``, ``kind``, times and what is known of a task."""

_MOST_TASKS: Final = 1 << 24
_DURATIONS: Final = frozenset({"duration_ns", "adding_ns", "launch_ends"})
_LISTS: Final = frozenset({"kind", "reads", "writes", "launch_ends"})


def write_trace(
    path: Path,
    trace: Trace,
    replayed: Replayed | None = None,
    *,
    step_ns: int | None = None,
    memory: Sequence[DeviceMemory] = (),
) -> None:
    """Write a trace, with its times on a machine if it was replayed.

    Args:
        path: the file.
        trace: what to write.
        replayed: when its rows ran.
        step_ns: how long a step takes.
        memory: of each device.

    Raises:
        OutputError: the path cannot be written.
    """
    lines = [{**HEAD, "rows": len(trace.rows)}, *_lines(trace)]
    if any(line["kind"] == "nest" for line in lines[1:]):
        lines[0] |= {"latencies_ns": trace.latencies_ns}
    if step_ns is not None:
        lines[0] |= {"step_ns": step_ns}
    if memory:
        lines[0] |= {"memory": [device._asdict() for device in memory]}
    if replayed is not None:
        times = zip(replayed.begin_ns, replayed.end_ns, replayed.host_ns, strict=True)
        # An autograd thread may have freed memory since the replay: rows at the end that it does not have.
        for line, own in zip(lines[1:], times, strict=False):
            line |= {name: value for name, value in zip(_TIMES, own, strict=True) if value >= 0}
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    write_files({path: text})


def read_trace(path: Path | str) -> Trace:
    """Read a trace; times that the file says are left out.

    Raises:
        TraceError: it cannot be read, was cut, or a line is not that of a row. Whether the rows can run is checked when
            they do.
    """
    path = Path(path)
    head, lines = read_lines(path)
    trace = Trace()
    try:
        trace.latencies_ns = tuple(map(int, head.get("latencies_ns", trace.latencies_ns)))
        known = min(trace.latencies_ns) >= 0 and max(trace.latencies_ns) < 1 << 63
    except (TypeError, ValueError):
        known = False
    if not known:
        rule = "latencies_ns of a trace must be whole numbers from 0 to 2^63 - 1, one or more"
        raise TraceError(f"{rule}, got {str(head['latencies_ns'])[:80]} in {path}; write it anew")
    names: dict[str, int] = {"": 0}
    rows = []
    for number, line in enumerate(lines, 2):
        try:
            rows.append(_row(line, names, trace))
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            got = f"{type(error).__name__}: {error}, in line {number} of {path}"
            raise TraceError(f"each line of a trace must be a row, got {got}; see the format's page") from error
    trace.rows, trace.names = (Row * len(rows))(*rows), tuple(names)
    trace.origin = path
    return trace


def _lines(trace: Trace) -> Iterator[dict[str, Any]]:
    """A line for each row, without what is a default."""
    trace.fetch()
    for number, row in enumerate(trace.rows):
        line = {name: getattr(row, name) for name in _DEFAULTS if name not in _LISTS}
        line |= {"name": trace.names[row.name]}
        if row.first_end:
            line["launch_ends"] = list(trace.launch_ends[row.first_end - 1 : row.first_end - 1 + row.launches])
        for name, first, end in (
            ("reads", row.first_read, row.first_write),
            ("writes", row.first_write, row.end_write),
        ):
            own = trace.accesses[3 * first : 3 * end]
            line[name] = [list(own[place : place + 3]) for place in range(0, len(own), 3)]
        task = dict(zip(_TASK, trace.tasks[row.task - 1], strict=False)) if row.task and trace.tasks else {}
        told = {name: value for name, value in line.items() if value != _DEFAULTS[name]}
        yield {"row": number, "kind": KINDS[row.kind], **task, **told}


def _row(line: dict[str, Any], names: dict[str, int], trace: Trace) -> Row:
    """The row of a line; its name, its accesses, its launches' ends and its task join the tables."""
    task = [line[name] for name in _TASK if name in line]
    line = {name: value for name, value in line.items() if name not in {*_TIMES, *_TASK, "row"}}
    if unknown := line.keys() - _DEFAULTS.keys():
        raise ValueError(f"unknown field {', '.join(sorted(unknown))}")
    row, line = Row(kind=KINDS.index(line["kind"])), {**_DEFAULTS, **line}
    row.name = names.setdefault(line["name"], len(names))
    row.first_read = len(trace.accesses) // 3
    row.first_write = row.first_read + len(line["reads"])
    row.end_write = row.first_write + len(line["writes"])
    for block, first, end in (*line["reads"], *line["writes"]):
        trace.accesses.extend((block, first, end))
    if line["launch_ends"]:
        if len(line["launch_ends"]) != line["launches"]:
            got = f"{len(line['launch_ends'])} for {line['launches']}"
            raise ValueError(f"launch_ends must have one number for each launch, got {got}")
        row.first_end = len(trace.launch_ends) + 1
        trace.launch_ends.extend(line["launch_ends"])
    for name in line.keys() - {"kind", "name", *_LISTS}:
        setattr(row, name, line[name])
        # The row keeps as many bits as it has, and says nothing.
        if getattr(row, name) != line[name]:
            bits = 8 * getattr(Row, name).size
            raise ValueError(f"{name} must be a whole number of {bits} bits, got {line[name]}")
    if not 0 <= row.task <= _MOST_TASKS:
        raise ValueError(f"task must be from 0 to {_MOST_TASKS}, got {row.task}")
    if row.task and task:
        # Rows of a task may come in any order among those of others.
        trace.tasks += [TracedTask("")] * (row.task - len(trace.tasks))
        trace.tasks[row.task - 1] = TracedTask(*task)
    return row


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two traces part, and how far.

    Attributes:
        row: the first row in which they differ in anything but their durations; None if there is none.
        first: that row of the first trace, as a line of the file; None if it has fewer rows.
        second: the same of the second.
        fields: fields in which these differ.
        durations: rows before that one whose durations differ.
    """

    row: int | None
    first: dict[str, Any] | None
    second: dict[str, Any] | None
    fields: tuple[str, ...]
    durations: int


def difference(first: Trace, second: Trace) -> Difference:
    """Compare two traces row by row.

    Numbers that only tell things apart count as equal if they tell the same things apart: threads, streams of a device
    but its default one, versions, blocks.
    """
    pairs = zip(_alike(first), _alike(second), strict=False)
    durations = 0
    for (line, plain), (other_line, other_plain) in pairs:
        if plain != other_plain:
            fields = [name for name in {**plain, **other_plain} if plain.get(name) != other_plain.get(name)]
            return Difference(line["row"], line, other_line, tuple(fields), durations)
        durations += line.get("duration_ns") != other_line.get("duration_ns")
    longer = next(iter([*_lines(first)][len(second.rows) :] + [*_lines(second)][len(first.rows) :]), None)
    if longer is None:
        return Difference(None, None, None, (), durations)
    ends_first = len(first.rows) < len(second.rows)
    return Difference(
        longer["row"], None if ends_first else longer, longer if ends_first else None, ("row",), durations
    )


def _alike(trace: Trace) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each line, and the same without its duration, numbered in the order in which numbers occur."""
    known: Counter[object] = Counter()
    numbers: dict[object, int] = {}

    def renamed(what: object, number: int) -> int:
        if (what, number) not in numbers:
            known[what] += 1
            numbers[what, number] = known[what]
        return numbers[what, number]

    for line in _lines(trace):
        plain = {name: value for name, value in line.items() if name not in _DURATIONS}
        what = "node" if line["kind"] in {"node", "root", "return"} else "block"
        plain["thread"] = renamed("thread", line.get("thread", 0))
        for name in ("task", "gradients", "meeting"):
            if name in line:
                plain[name] = renamed(name, line[name])
        for name in ("version", "pass"):
            plain[name] = renamed("version", line[name]) if name in line else 0
        if "block" in line:
            plain["block"] = renamed("block", line["block"])
        for name in ("reads", "writes"):
            plain[name] = [(renamed(what, block), *span) for block, *span in line.get(name, ())]
        for name, device in (("stream", "device"), ("peer_stream", "peer")):
            if name in line:
                plain[name] = renamed(("stream", line.get(device)), line[name])
        yield line, plain


def differences_text(found: Difference, names: Sequence[str]) -> str:
    """What a person reads of a difference; ``names``: of the two traces."""
    told = f"{found.durations} rows have other durations" if found.durations else "all durations are equal"
    if found.row is None:
        return f"the same rows; {told}"
    lines = (
        f"  {name}: {'no such row' if line is None else json.dumps(line)}"
        for name, line in zip(names, (found.first, found.second), strict=True)
    )
    before = f"of the {found.row} rows before, {told}" if found.row else "no row before"
    return "\n".join((f"row {found.row} differs in {', '.join(found.fields)}; {before}", *lines))
