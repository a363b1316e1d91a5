"""Raw results become tables; every value comes back as it was."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import pandas as pd
import pytest

from gpipe_bench.errors import ConfigError, OutputError
from gpipe_bench.figures.tables import read_events, read_rows
from gpipe_bench.results.rows import Row
from gpipe_bench.results.timeline import TimelineEvent
from gpipe_bench.suite.evaluation.collect import collect
from gpipe_bench.suite.running.run import failed_result
from gpipe_bench.suite.storage.raw import DEVICE_COLUMNS, STEP_COLUMNS, RawResult
from tests.suite.cells_of import cell, ok_result


def stored(folder, *results):
    paths = []
    for result in results:
        path = folder / "raw" / result.cell / f"{result.row.repeat}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(result.to_json())
        paths.append(path)
    return paths


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


RESULTS = (
    ok_result("baseline", 0, throughput=1 / 3),
    ok_result("baseline", 1, throughput=0.1 + 0.2, dirty=True),
    ok_result("dep-x-x", 0, peak_reserved_gib=1e-9),
    failed_result(cell(variant="dep-str-ptl"), 0, "unsupported", 'copy_streams needs an accelerator; "really", see x'),
)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "results" / "ablation.csv"


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.row.status)
def test_a_raw_result_comes_back(tmp_path, result):
    (path,) = stored(tmp_path, result)
    assert RawResult.read(path) == result


def test_rows_come_back_bit_by_bit(tmp_path, out):
    rows = collect(stored(tmp_path, *RESULTS), "ablation", out)
    assert read_rows(out, Row.columns()) == rows
    assert [row.experiment for row in rows] == ["ablation"] * 4
    assert [replace(row, experiment="", run_as="") for row in rows] == [result.row for result in RESULTS]


def test_pandas_sees_the_types_of_the_schema(tmp_path, out):
    collect(stored(tmp_path, *RESULTS[:3]), "ablation", out)
    frame = pd.read_csv(out)
    assert tuple(frame.columns) == Row.columns()
    for name in ("clock_cycle", "fork_join", "copy_streams", "portals", "early_recompute", "dirty"):
        assert frame[name].dtype == bool
    assert frame["chunks"].dtype == "int64"
    assert frame["throughput_samples_per_s"].tolist() == [1 / 3, 0.1 + 0.2, 10.0]


def damaged(path, change):
    """The file with one thing in it changed."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


# Which values columns hold: tests/pure/test_tables.py.
WRONG = {
    "infinity": ("row", "throughput_samples_per_s", math.inf, "a finite number, got inf"),
    "null in a step": ("steps", "step", None, "given, got nothing"),
    "in a device": ("devices", "compute_fraction", -0.5, "at least 0 and at most 1, got -0.5"),
    "kind of event": ("events", "kind", "sideways", "one of forward, recompute"),
    "unknown column": ("devices", "speed", 3, "a column of devices, got an unknown one"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_its_column_may_not_hold_is_refused(tmp_path, out, name):
    part, column, value, said = WRONG[name]
    (path,) = stored(tmp_path, RESULTS[0])

    def change(data):
        (data[part] if part == "row" else data[part][0])[column] = value

    with pytest.raises(ConfigError, match="must") as caught:
        collect([damaged(path, change)], "ablation", out)
    (problem,) = caught.value.problems
    assert str(path) in problem
    assert f"{column} must be {said}" in problem or f"'{column}' must be {said}" in problem
    assert not out.exists()


@pytest.mark.parametrize("column", ["throughput_samples_per_s", "step_time_ms"])
def test_a_run_that_is_ok_has_values(tmp_path, out, column):
    (path,) = stored(tmp_path, RESULTS[0])
    with pytest.raises(
        ConfigError, match=f"must hold {column} of a run that is ok, got none in .*; delete it, then run it again"
    ):
        collect([damaged(path, lambda data: data["row"].update({column: None}))], "ablation", out)


def test_of_many_wrong_values_some_are_named(tmp_path, out):
    (path,) = stored(tmp_path, RESULTS[0])
    with pytest.raises(ConfigError) as caught:
        collect([damaged(path, lambda data: data.update(steps=[{"step": -1}] * 100))], "ablation", out)
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1].startswith("and 80 more like these")


DAMAGES = {
    "nested": "[" * 100_000,
    "digits": "9" * 5000,
    "cut short": '{"cell": "a", "row": {}',
    "zeros": "\0" * 100,
    "steps that are none": '{"cell": "a", "row": {}, "steps": 3}',
    "steps that are no records": '{"cell": "a", "row": {}, "steps": [3]}',
    "cell that is no text": '{"cell": 3, "row": {}}',
    "row that is none": '{"cell": "a", "row": []}',
    "configuration that is no text": '{"cell": "a", "row": {}, "configuration": 3}',
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named(tmp_path, out, name):
    (tmp_path / "raw.json").write_text(DAMAGES[name])
    with pytest.raises(ConfigError, match=r"raw result must be a file that run wrote, got .*raw\.json"):
        collect([tmp_path / "raw.json"], "ablation", out)


def test_companions_are_keyed_by_cell_variant_and_repeat(tmp_path, out):
    collect(stored(tmp_path, *RESULTS), "ablation", out)
    keys = ["cell", "variant", "repeat"]
    devices, steps = table(out.with_name("ablation_devices.csv")), table(out.with_name("ablation_steps.csv"))
    assert list(devices[0]) == [*keys, *DEVICE_COLUMNS]
    assert list(steps[0]) == [*keys, *STEP_COLUMNS]
    assert [tuple(row[key] for key in keys) for row in steps] == [
        (result.cell, result.row.variant, str(result.row.repeat)) for result in RESULTS[:3]
    ]
    assert float(steps[0]["step_time_ms"]) == 0.1 + 0.2
    assert float(devices[0]["compute_fraction"]) == 1 / 3
    assert devices[0]["peak_reserved_gib"] == ""


def test_events_come_back(tmp_path, out):
    collect(stored(tmp_path, *RESULTS), "ablation", out)
    path = out.with_name("ablation_events.csv")
    assert list(table(path)[0]) == ["cell", "variant", "repeat", "evidence", *TimelineEvent.columns()]
    records = read_events(path)
    assert [(record.cell, record.repeat) for record in records] == [(r.cell, r.row.repeat) for r in RESULTS[:3]]
    assert [record.event.to_dict() for record in records] == [result.events[0] for result in RESULTS[:3]]


def test_the_same_raw_results_give_the_same_bytes(tmp_path, out):
    paths = stored(tmp_path, *RESULTS)
    collect(paths, "ablation", out)
    first = {path.name: path.read_bytes() for path in out.parent.glob("*.csv")}
    collect(paths, "ablation", out)
    assert {path.name: path.read_bytes() for path in out.parent.glob("*.csv")} == first
    assert len(first) == 5


def test_every_digest_leads_to_all_settings(tmp_path, out):
    """Two repeats have one configuration; a cell that was not run has one too."""
    collect(stored(tmp_path, *RESULTS), "ablation", out)
    records = table(out.with_name("ablation_configurations.csv"))
    known = {record["config_sha256"]: json.loads(record["configuration"]) for record in records}
    assert list(known) == list(dict.fromkeys(result.row.config_sha256 for result in RESULTS))
    settings = known[cell(variant="baseline").config_sha256]
    assert settings == cell(variant="baseline").settings()
    assert (settings["threads"], settings["warmup"], settings["steps"]) == (1, 0, 2)


def test_a_row_without_its_configuration_is_refused(tmp_path, out):
    for text, word in (("", "none"), ("{}", "another")):
        paths = stored(tmp_path, replace(RESULTS[0], configuration=text))
        with pytest.raises(ConfigError, match=f"the configuration that its row has the digest of, got {word} in"):
            collect(paths, "ablation", out)
    assert not out.exists()


def test_all_wrong_files_are_named_and_nothing_is_written(tmp_path, out):
    good, double = stored(tmp_path, RESULTS[0]), tmp_path / "double.json"
    double.write_text(RESULTS[0].to_json())
    broken, foreign, old = (tmp_path / name for name in ("broken.json", "foreign.json", "old.json"))
    broken.write_text(RESULTS[0].to_json()[:-40])
    foreign.write_text('{"a": 1}')
    old.write_text(RESULTS[0].to_json().replace('"dirty"', '"dirtyness"'))
    with pytest.raises(ConfigError) as caught:
        collect([*good, double, broken, foreign, old, tmp_path / "absent.json"], "ablation", out)
    found = caught.value.problems
    assert len(found) == 5
    assert found[0].startswith("every run must be given once, got repeat 0 of measured-unet-baseline")
    for path, problem in zip((broken, foreign, old, tmp_path / "absent.json"), found[1:], strict=True):
        assert problem.startswith(f"raw result must be a file that run wrote, got {path} (")
    assert "dirtyness" in found[3]
    assert not out.parent.exists()


def test_a_row_that_breaks_a_rule_is_refused(tmp_path, out):
    (path,) = stored(tmp_path, RESULTS[0])
    path.write_text(path.read_text().replace('"status": "ok"', '"status": "oom"'))
    with pytest.raises(ConfigError, match="reason must be given when status is 'oom'"):
        collect([path], "ablation", out)


def test_a_companion_that_cannot_be_written_keeps_the_old_table(tmp_path, out):
    out.parent.mkdir()
    out.write_text("old")
    out.with_name("ablation_events.csv").mkdir()
    with pytest.raises(OutputError):
        collect(stored(tmp_path, *RESULTS), "ablation", out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["ablation.csv", "ablation_events.csv"]
    assert out.read_text() == "old"
