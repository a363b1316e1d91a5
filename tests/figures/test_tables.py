import pytest

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.ablation import ABLATION
from gpipe_bench.figures.tables import read_events, read_rows
from tests.figures.synthetic import (
    EVENT_COLUMNS,
    ablation_row,
    cpu_ablation,
    event_records,
    step_events,
    write_csv,
    write_events,
    write_rows,
)


def test_rows_come_back_as_they_were_written(tmp_path):
    rows = [*cpu_ablation(), ablation_row("dep-x-x", dirty=True, throughput_samples_per_s=1.25)]
    assert read_rows(write_rows(tmp_path / "rows.csv", rows), ()) == rows


def test_events_come_back_as_they_were_written(tmp_path):
    events = step_events(3, 2, copies=True)
    records = read_events(write_events(tmp_path / "events.csv", event_records(events, "dep-str-x", 2, "c-1")))
    assert [record.event for record in records] == events
    assert {(r.cell, r.variant, r.repeat, r.evidence) for r in records} == {("c-1", "dep-str-x", 2, "measured")}


def test_whole_numbers_with_a_point_are_read_as_pandas_writes_them(tmp_path):
    path = write_csv(tmp_path / "rows.csv", ["evidence", "status", "chunks", "repeat"], [{
        "evidence": "measured", "status": "ok", "chunks": "8.0", "repeat": "",
    }])  # fmt: skip
    (row,) = read_rows(path, ("chunks",))
    assert (row.chunks, row.repeat) == (8, None)


def test_unknown_columns_are_passed_over(tmp_path):
    path = write_csv(tmp_path / "rows.csv", ["evidence", "status", "colour"], [
        {"evidence": "measured", "status": "ok", "colour": "red"},
    ])  # fmt: skip
    assert len(read_rows(path, ())) == 1


def test_missing_columns_are_all_named_with_the_nearest_name(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("evidence,varient,status\nmeasured,baseline,ok\n")
    with pytest.raises(ConfigError) as caught:
        ABLATION.draw(path, tmp_path / "figure")
    assert any("'variant'" in problem and "use 'varient'" in problem for problem in caught.value.problems)
    assert any("'throughput_samples_per_s'" in problem for problem in caught.value.problems)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.csv"]


@pytest.mark.parametrize(("text", "found"), [("", "an empty file"), ("evidence,variant\n", "a header alone")])
def test_a_table_without_rows_is_refused(tmp_path, text, found):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"table must have at least one row, got {found}"):
        ABLATION.draw(path, tmp_path / "figure")


def test_an_absent_table_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"table must be a readable CSV file, got .*absent\.csv"):
        ABLATION.draw(tmp_path / "absent.csv", tmp_path / "figure")


def test_a_wrong_value_is_named_with_its_line(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("evidence,status,chunks\nmeasured,ok,8\nmeasured,ok,8.5\nguessed,ok,8\n")
    with pytest.raises(ConfigError) as caught:
        read_rows(path, ())
    assert "line 3: chunks must be of type int, got '8.5'" in caught.value.problems[0]
    assert (
        "line 4: evidence must be one of published, simulated, emulated, measured, got 'guessed'"
        in caught.value.problems[1]
    )


def test_many_wrong_lines_are_counted_instead_of_listed(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("evidence,status,chunks\n" + "measured,ok,eight\n" * 9)
    with pytest.raises(ConfigError) as caught:
        read_rows(path, ())
    assert len(caught.value.problems) == 6
    assert caught.value.problems[-1] == "and 4 more lines like these"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "foward"}, "kind must be one of forward, recompute"),
        ({"stream": "side"}, "stream must be one of compute, copy"),
        ({"end_us": -5.0}, "end_us must not be earlier than start_us"),
        ({"start_us": ""}, "start_us must be given, got nothing"),
    ],
)
def test_a_wrong_event_is_refused(tmp_path, change, message):
    (record, *_) = event_records(step_events(1, 1, copies=False), "baseline")
    path = write_csv(tmp_path / "events.csv", EVENT_COLUMNS, [{**record, **change}])
    with pytest.raises(ConfigError, match=f"line 2: {message}"):
        read_events(path)


def test_an_unknown_variant_in_the_rows_is_named_with_the_nearest_label(tmp_path):
    path = tmp_path / "rows.csv"
    text = write_rows(path, [ablation_row("dep-str-ptl")]).read_text()
    path.write_text(text.replace("dep-str-ptl", "dep-str-prt"))
    with pytest.raises(ConfigError, match="got 'dep-str-prt'; use 'dep-str-ptl'"):
        ABLATION.draw(path, tmp_path / "figure")


def test_a_variant_that_is_like_no_label_is_told_three_of_them(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(write_rows(path, [ablation_row("dep-str-ptl")]).read_text().replace("dep-str-ptl", "nonsense"))
    with pytest.raises(ConfigError, match=r"got 'nonsense'; use '\S+', '\S+' or '\S+'$"):
        ABLATION.draw(path, tmp_path / "figure")
