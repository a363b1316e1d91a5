"""A trace in a file is the trace, and two traces part where they do."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from gpipe_bench.errors import TraceError
from gpipe_bench.machine.replay import replay
from gpipe_bench.machine.trace import KINDS, Record
from gpipe_bench.machine.trace_file import difference, read_trace, write_trace
from tests.emulator.bed.rows import Bed, traced

OF_A_BLOCK = ("alloc", "free", "record_stream")


def random_record(draw):
    """A row with every field at random, of which any may have its default."""
    kind = draw.choice(KINDS)
    one = draw.randrange(1, 9)
    return Record(
        kind,
        draw.choice(("", "mm", 'ünïcode\n"name"')),
        draw.randrange(-1, 3),
        draw.randrange(4),
        draw.randrange(4),
        draw.choice((None, 0.0, 0.000001, 12.345678)),
        draw.randrange(2**40),
        draw.randrange(6),
        draw.randrange(-1, 3),
        () if kind in OF_A_BLOCK else tuple(draw.sample(range(1, 9), draw.randrange(3))),
        (one,) if kind in OF_A_BLOCK else tuple(draw.sample(range(1, 9), draw.randrange(3))),
        draw.randrange(3),
        draw.randrange(3),
        draw.randrange(3),
        draw.random() < 0.5,
        draw.random() < 0.5,
    )


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_read_is_what_was_written(tmp_path, name, seed):
    draw = random.Random(seed)
    trace = traced(*(random_record(draw) for _ in range(40)))
    write_trace(tmp_path / name, trace)
    found = read_trace(str(tmp_path / name))
    assert found.records == trace.records
    assert difference(trace, found).row is None


def test_a_file_has_the_times_of_a_replay(tmp_path):
    trace = traced(Record("kernel", "a", 0, duration=3), Record("kernel", "b", 0, duration=4))
    write_trace(tmp_path / "trace.jsonl", trace, replay(trace, Bed()))
    head, *lines = map(json.loads, (tmp_path / "trace.jsonl").read_text().splitlines())
    assert head == {"format": "gpipe_bench trace", "version": 1, "rows": 2}
    assert [(line["begin_ns"], line["end_ns"]) for line in lines] == [(0, 3_000_000), (3_000_000, 7_000_000)]
    assert read_trace(tmp_path / "trace.jsonl").records == trace.records


KERNEL = Record("kernel", "mm", 0, duration=3, reads=(4,), writes=(5,), thread=2)


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        ({"name": "add"}, ("name",)),
        ({"device": 1}, ("device",)),
        ({"reads": (5,)}, ("reads", "writes")),
        ({"launches": 2}, ("launches",)),
        ({"kind": "copy"}, ("kind",)),
        ({"nbytes": 1}, ("bytes",)),
        ({"backward": 1}, ("pass",)),
        ({"stream": 3}, ("stream",)),
    ],
)
def test_the_first_row_that_differs_is_named(other, fields):
    changed = KERNEL._replace(**other)
    found = difference(traced(KERNEL, KERNEL, KERNEL), traced(KERNEL, changed, KERNEL))
    assert found.row == 1
    assert set(found.fields) <= {*fields}
    assert found.first["row"] == found.second["row"] == 1


def test_durations_are_counted():
    longer = KERNEL._replace(duration=4)
    found = difference(traced(KERNEL, KERNEL, KERNEL), traced(longer, KERNEL, longer))
    assert (found.row, found.durations) == (None, 2)


def test_numbers_may_differ_that_tell_the_same_things_apart():
    numbered = [Record("signal", version=version, thread=thread) for version, thread in ((3, 5), (4, 1), (9, 5))]
    other = [Record("signal", version=version, thread=thread) for version, thread in ((1, 0), (2, 7), (3, 0))]
    crossed = [*other[:2], other[2]._replace(thread=7)]
    assert difference(traced(*numbered), traced(*other)).row is None
    assert difference(traced(*numbered), traced(*crossed)).row == 2


def test_the_default_stream_is_another_one():
    default, pooled, other = (traced(KERNEL._replace(stream=stream)) for stream in (0, 1, 7))
    assert difference(pooled, other).row is None
    assert difference(default, other).row == 0


@pytest.mark.parametrize("turned", [False, True])
def test_a_trace_that_ends_first_parts_there(turned):
    pair = [traced(KERNEL), traced(KERNEL, KERNEL)]
    found = difference(*(reversed(pair) if turned else pair))
    assert found.row == 1
    assert (found.first is None) != turned


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be a file of JSON lines"),
        ("{}", "must begin with"),
        ("[1", "must be a file of JSON lines"),
        ("HEAD\n{}", "KeyError: 'kind', in line 2"),
        ('HEAD\n{"kind": "nothing"}', "in line 2"),
        ('HEAD\n{"kind": "mark"}\n{"kind": "mark", "colour": 1}', "unknown field colour, in line 3"),
        ('HEAD\n{"kind": "mark", "thread": "two"}', "in line 2"),
        ('HEAD\n{"kind": "kernel", "reads": [4]}', "in line 2"),
        ("HEAD\n7", "in line 2"),
        (
            'HEAD\n{"kind": "kernel", "launches": 2147483648}',
            "launches must be a whole number of 32 bits, got 2147483648",
        ),
        (
            'HEAD\n{"kind": "kernel", "bytes": -9223372036854775809}',
            "bytes must be a whole number of 64 bits, got -922",
        ),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, words):
    path = tmp_path / "trace.jsonl"
    path.write_text(text.replace("HEAD", json.dumps({"format": "gpipe_bench trace", "version": 1})))
    with pytest.raises(TraceError, match=words):
        read_trace(path)


def test_sums_count_kernels_and_first_gradients_without_adding_them(tmp_path):
    kernel = {"kind": "kernel", "device": 1, "duration_ns": 10, "launches": 2}
    adding = {**kernel, "adding_ns": 3, "adding_launches": 1}
    copy = {"kind": "copy", "device": 1, "peer": 0, "duration_ns": 50, "launches": 1}
    rows = [kernel, {**adding, "gradients": 1}, {**adding, "gradients": 2}, {**adding, "gradients": 1}, copy]
    rows += [{"kind": "update", "device": 1, "duration_ns": 7}, {"kind": "host", "duration_ns": 90}]
    (tmp_path / "trace.jsonl").write_text(
        "\n".join(map(json.dumps, ({"format": "gpipe_bench trace", "version": 1}, *rows)))
    )
    trace = read_trace(tmp_path / "trace.jsonl")
    assert trace.sums("duration_ns") == {1: 34}
    assert trace.sums("duration_ns", 1, 3) == {1: 14}
    assert trace.sums("launches") == {1: 9}
    assert (trace.updating_ns(), trace.updating_ns(0, 5)) == (7, 0)


def test_a_file_that_is_cut_or_absent_is_refused(tmp_path):
    whole = gzip.compress(b"x" * 1000)
    (tmp_path / "cut.gz").write_bytes(whole[:-9])
    for name in ("cut.gz", "absent.jsonl"):
        with pytest.raises(TraceError, match="must be a file of JSON lines"):
            read_trace(tmp_path / name)
