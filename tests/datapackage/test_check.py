"""Frictionless accepts the reference results, and finds what is wrong with changed ones."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pandas as pd
import pytest

from gpipe_bench.cli import main
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import csv_text, header_of
from gpipe_bench.suite.datapackage.check import check_folder
from gpipe_bench.suite.datapackage.descriptor import DESCRIPTOR, write_descriptor
from gpipe_bench.suite.datapackage.take import take_reference
from tests.project.pages import PAGES
from tests.suite.cells_of import ok_result

_ROW = ["cell", "repeat", "partitions", "balance"]


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.slow  # the next test reads less of the longest tables
def test_the_reference_results_are_valid():
    assert check_folder(REFERENCE_FOLDER) == []


def test_the_reference_results_are_valid_where_companions_have_fewer_lines(tmp_path):
    folder = shutil.copytree(REFERENCE_FOLDER, tmp_path / "reference")
    for end in ("devices", "events", "layers", "steps"):
        for path in folder.rglob(f"*_{end}.csv"):
            header, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            path.write_text("".join((header, *lines[:: 1 + len(lines) // 500])), encoding="utf-8")
    write_descriptor(folder)
    assert check_folder(folder) == []


def test_lines_of_devices_name_partitions_of_their_row():
    for path in sorted(REFERENCE_FOLDER.rglob("*_devices.csv")):
        rows = pd.read_csv(path.with_name(path.name.replace("_devices.csv", ".csv")), usecols=_ROW)
        lines = pd.read_csv(path).merge(rows, on=["cell", "repeat"], suffixes=("", "_row"))
        index = lines["device"].str.partition(":")[2].replace("", "0").astype(int)
        assert (lines["device_index"] == index).all(), path
        assert (lines["partition"].isna() | (lines["partition"] < lines["partitions"])).all(), path
        several = lines.groupby(["cell", "repeat"])["cell"].transform("size") < lines["partitions"]
        assert (lines["partition"].isna() == several).all(), path
        balances = lines["balance"].str.split("-")
        own = [int(some[int(j)]) for some, j in zip(balances, lines["partition"], strict=True) if pd.notna(j)]
        assert lines["layers"][~several].tolist() == own, path


def test_a_documented_groupby_keeps_every_row():
    documented = re.findall(r"\b(\w+)\.groupby\((.*?)\)\[", PAGES["docs/results.md"])
    assert len(documented) == 2
    for path in sorted(REFERENCE_FOLDER.rglob("*.csv")):
        if header_of(path) == list(Row.columns()):
            rows = pd.read_csv(path)
            for name, arguments in documented:
                groups = eval(f"{name}.groupby({arguments})", {name: rows})
                assert groups.size().sum() == len(rows), path


def test_a_changed_number_is_noticed(package):
    edit(package / "published" / "published.csv", "30.662", "31.662")
    problems = " ".join(check_folder(package))
    assert "hash" in problems
    assert "published/published.csv" in problems


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("30.662", "fast", 'type is "number/default"'),
        (",ok,components=none", ",fine,components=none", 'constraint "enum'),
        (",unet,depth=5;B=5;C=64;size=192,4,8,throughput", ",unet,depth=5;B=5;C=64;size=192,0,8,throughput", "minimum"),
    ],
)
def test_a_value_against_its_column_is_named(package, old, new, words):
    edit(package / "published" / "published.csv", old, new)
    # With a hash that fits, only the schema can find it.
    write_descriptor(package)
    problems = check_folder(package)
    assert len(problems) == 1
    assert words in problems[0]


def test_a_line_that_is_there_twice_is_named(package):
    path = package / "published" / "settings.csv"
    path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n")
    write_descriptor(package)
    assert "primary key" in " ".join(check_folder(package)).lower()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [(",baseline,0,", ",baseline,7,", "foreign key"), (",baseline,1,", ",baseline,0,", "primary key")],
)
def test_a_step_of_a_run_that_is_not_there_or_twice_is_named(package, table, old, new, words):
    take_reference(table, package, "box")
    edit(package / "measured" / "box" / "ablation_steps.csv", old, new)
    write_descriptor(package)
    (problem,) = check_folder(package)
    assert words in problem.lower()


def test_a_configuration_that_is_not_what_its_digest_says_is_named(package, table):
    take_reference(table, package, "box")
    path = package / "measured" / "box" / "ablation_configurations.csv"
    edit(path, '""threads"": 1', '""threads"": 2')
    write_descriptor(package)
    (problem,) = check_folder(package)
    assert problem.startswith("measured/box/ablation_configurations.csv, line 2: config_sha256 must be the digest")


def test_a_row_whose_configuration_is_not_there_is_named(package, table):
    take_reference(table, package, "box")
    path = package / "measured" / "box" / "ablation_configurations.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    write_descriptor(package)
    (problem,) = check_folder(package)
    assert "foreign key" in problem.lower()


@pytest.mark.parametrize(
    ("evidence", "name"),
    [
        *(("measured", name) for name in ("commit", "config_sha256", "torch", "python")),
        *(("simulated", name) for name in ("commit", "config_sha256", "profile")),
        ("published", "source"),
    ],
)
def test_a_row_with_values_that_does_not_say_where_they_are_from_is_named(package, evidence, name):
    origin = {"source": "torchgpipe:README.md"} if evidence == "published" else {}
    whole = replace(ok_result("baseline", 0).row, evidence=evidence, **origin)
    failed = replace(whole, repeat=1, status="oom", reason="memory", throughput_samples_per_s=None, **{name: ""})
    path = package / evidence / "box" / "ablation.csv"
    path.parent.mkdir(parents=True)
    path.write_text(csv_text(Row.columns(), [row.to_dict() for row in (whole, failed)]))
    assert not [problem for problem in check_folder(package) if "must be given" in problem]
    path.write_text(csv_text(Row.columns(), [replace(whole, **{name: ""}).to_dict()]))
    (problem,) = [problem for problem in check_folder(package) if "must be given" in problem]
    rule = f"{name} must be given in a {evidence} row that is ok, got none; take it again"
    assert problem == f"{evidence}/box/ablation.csv, line 2: {rule}"


def test_a_row_that_another_program_measured_names_it_instead_of_a_commit(package):
    row = replace(ok_result("baseline", 0).row, commit="", python="", dirty=None, source="a study")
    path = package / "measured" / "box" / "ablation.csv"
    path.parent.mkdir(parents=True)
    path.write_text(csv_text(Row.columns(), [row.to_dict()]))
    assert not [problem for problem in check_folder(package) if "must be given" in problem]


def test_a_table_that_is_not_described_is_named(package, table):
    take_reference(table, package, "box")
    (problem,) = check_folder(package)
    assert "measured/box/ablation.csv" in problem
    assert "datapackage write" in problem


@pytest.mark.parametrize("text", ["[", "3", "[" * 100_000])
def test_a_descriptor_that_is_none_is_refused(package, text):
    (package / DESCRIPTOR).write_text(text)
    with pytest.raises(ConfigError, match="data package must have a descriptor"):
        check_folder(package)


@pytest.mark.parametrize("resources", ["3", "[3]", "null"])
def test_a_descriptor_without_resources_is_outdated(package, resources):
    (package / DESCRIPTOR).write_text(f'{{"resources": {resources}}}')
    assert any("descriptor must be that of the files" in problem for problem in check_folder(package))


def test_a_folder_without_descriptor_is_refused(package):
    (package / DESCRIPTOR).unlink()
    with pytest.raises(ConfigError, match="data package must have a descriptor"):
        check_folder(package)


def test_the_command_fails_loudly(package, capsys):
    edit(package / "published" / "published.csv", "30.662", "31.662")
    with pytest.raises(SystemExit) as caught:
        main(["datapackage", "check", "--folder", str(package)])
    assert caught.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(re.match("error: ", line) for line in lines)
