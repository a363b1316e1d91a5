"""Tables become DataFrames with the types of their columns, and a file that is not whole is refused."""

from __future__ import annotations

import math

import pytest

from gpipe_bench.errors import ConfigError
from gpipe_bench.results.rows import Row
from gpipe_bench.results.schema import check_value, column_field, table_of
from gpipe_bench.results.tables import csv_text, frame_of, plain_records, read_records, read_table, read_text
from tests.figures.synthetic import ablation_row, cpu_ablation, write_rows
from tests.project.tree import ROOT

REFERENCE = ROOT / "results/reference"
HEAD = "evidence,status,chunks,throughput_samples_per_s\n"
LINE = "measured,ok,8,10.5\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.csv"


def test_a_column_has_the_type_of_its_field(path):
    path.write_text(HEAD.strip() + ",dirty\n" + LINE.strip() + ",True\nmeasured,ok,,,\n")
    table = read_table(path, records=Row)
    names = ["evidence", "chunks", "throughput_samples_per_s", "dirty"]
    assert list(map(str, table[names].dtypes)) == ["str", "Int64", "float64", "boolean"]
    assert plain_records(table[names]) == [
        {"evidence": "measured", "chunks": 8, "throughput_samples_per_s": 10.5, "dirty": True},
        {"evidence": "measured", "chunks": None, "throughput_samples_per_s": None, "dirty": None},
    ]


def test_columns_of_rows_that_are_absent_have_their_defaults(path):
    path.write_text(HEAD + LINE)
    table = read_table(path, records=Row)
    assert tuple(table.columns) == Row.columns()
    assert plain_records(table) == [
        Row(evidence="measured", chunks=8, throughput_samples_per_s=10.5).to_dict(),
    ]


def test_rows_become_a_table_and_come_back(path):
    rows = cpu_ablation()
    path.write_text(csv_text(Row.columns(), frame_of(rows, Row)))
    assert path.read_text() == csv_text(Row.columns(), [row.to_dict() for row in rows])
    assert read_records(path, (), Row) == rows
    assert frame_of([], Row).empty


def test_numbers_keep_every_bit(path):
    values = [0.1, 1 / 3, 1e-300, 123456789.123456789, 5e-324, 1.7976931348623157e308]
    path.write_text(csv_text(Row.columns(), [{**Row().to_dict(), "step_time_ms": value} for value in values]))
    assert list(read_table(path, records=Row)["step_time_ms"]) == values


def test_text_is_written_as_it_is():
    records = [{"a": 'say "x", y', "b": True}, {"a": "two\nlines", "b": None}, {"b": 1e16}]
    assert csv_text(("a", "b", "c"), records) == 'a,b,c\n"say ""x"", y",True,\n"two\nlines",,\n,1e+16,\n'
    assert csv_text(("a", "b"), []) == "a,b\n"
    with pytest.raises(ValueError, match=r"must have the columns of the table, got \['b'\]"):
        csv_text(("a",), records[:1])


@pytest.mark.parametrize(
    "path", sorted(REFERENCE.glob("*/*/*n*.csv")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_reference_tables_keep_their_limits_and_their_bytes(path):
    text = read_text(path)
    kind = table_of(list(text.columns), path)
    table = read_table(path, kind.columns, kind=kind.name)
    assert csv_text(kind.columns, text).encode() == path.read_bytes()
    # Predictions have six digits, which are not always the shortest.
    if kind.name != "predictions":
        assert csv_text(kind.columns, table).encode() == path.read_bytes()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "must have at least one row, got an empty file"),
        (b"\xff\xfe\x00", "must be a readable CSV file, got .*codec can't decode"),
        (HEAD + LINE + "\0" * 50, "with NUL bytes"),
        (HEAD + LINE + "measured,ok,8,1", "without a line end after its last line"),
        (HEAD + LINE + "measured,ok,8\n", "line 3: line must have 4 fields, got fewer"),
        (HEAD + LINE + "\n" + LINE, "line 3: line must have 4 fields, got fewer"),
        (HEAD + LINE + "measured,ok,8,1,\n", "Expected 4 fields in line 3, saw 5"),
        (HEAD + LINE + 'measured,"ok,8,1\n', "must be a readable CSV file"),
        (HEAD.replace("chunks", "status") + LINE, "columns of .* must differ, got 'status' twice"),
        (HEAD.replace("chunks", "chanks") + LINE, "must be known, got 'chanks'; did you mean 'chunks'"),
        (HEAD + "measured,ok,-8,10.5\n", "chunks must be at least 1, got '-8'"),
        (HEAD + "measured,ok,8,-10.5\n", "throughput_samples_per_s must be at least 0, got '-10.5'"),
        (HEAD + "measured,ok,8,Infinity\n", "must be of type float, got 'Infinity'"),
        (HEAD + "measured,ok,8,1e999\n", "must be a finite number, got '1e999'"),
        (HEAD + "measured,ok,8,nan\n", "must be of type float, got 'nan'"),
        (HEAD + "measured,ok,8,1_0\n", "must be of type float, got '1_0'"),
        (HEAD + "measured,okay,8,1\n", "status must be one of ok, oom"),
        (HEAD + ",ok,8,1\n", "evidence must be given, got nothing"),
        (HEAD.replace("chunks", "copy_fraction") + "measured,ok,1.01,1\n", "at least 0 and at most 1, got '1.01'"),
        (HEAD.replace("chunks", "balance") + "measured,ok,1-2-,1\n", "balance must be of the form"),
        (HEAD.replace("chunks", "dirty") + "measured,ok,yes,1\n", "dirty must be of type bool, got 'yes'"),
    ],
)
def test_what_is_not_whole_is_refused(path, content, words):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=words):
        read_table(path, records=Row)


def test_a_run_that_stands_twice_is_refused(path):
    rows = [ablation_row("baseline", repeat, cell="a") for repeat in (0, 1)]
    write_rows(path, rows)
    assert len(read_records(path, (), Row)) == 2
    write_rows(path, [*rows, rows[0]])
    with pytest.raises(ConfigError, match="line 4: line must differ from those above, got the same"):
        read_records(path, (), Row)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("throughput_samples_per_s", math.inf, "a finite number"),
        ("throughput_samples_per_s", -1.0, "at least 0"),
        ("throughput_samples_per_s", True, "of type float"),
        ("throughput_samples_per_s", "1", "of type float"),
        ("chunks", 2.5, "of type int"),
        ("evidence", None, "given"),
    ],
)
def test_values_that_were_never_text_have_the_same_limits(name, value, rule):
    with pytest.raises(ValueError, match=f"{name} must be {rule}"):
        check_value(column_field(name, "rows"), value)
