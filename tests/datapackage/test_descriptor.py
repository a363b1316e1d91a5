"""The descriptor says what every column holds, and nothing that is no longer so."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import fields

import pytest

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.catalogue import COMPANION_SUFFIXES
from gpipe_bench.results.rows import PeerRow, Row
from gpipe_bench.results.schema import TABLES, table_of
from gpipe_bench.results.transparency_rows import TransparencyRow
from gpipe_bench.suite.datapackage.descriptor import DESCRIPTOR, describe_folder, write_descriptor
from tests.project.tree import ROOT

DESCRIBED = {table.name: table.fields for table in TABLES.values()}


@pytest.mark.parametrize("kind", TABLES.values(), ids=TABLES)
def test_every_column_has_a_type_and_a_meaning(kind):
    fields = DESCRIBED[kind.name]
    assert tuple(fields) == kind.columns
    assert all(field["type"] in {"string", "integer", "number", "boolean"} for field in fields.values())
    assert all(len(field["description"]) > 3 for field in fields.values())


@pytest.mark.parametrize("kind", TABLES.values(), ids=TABLES)
def test_a_number_whose_name_has_a_unit_says_that_unit(kind):
    units = {"_samples_per_s": "samples/s", "_ms": "ms", "_us": "us", "_gib": "GiB", "_fraction": "1"}
    for name, field in DESCRIBED[kind.name].items():
        for suffix, unit in units.items():
            if name.endswith(suffix) and field["type"] == "number":
                assert field["unit"] == unit, name
                break


def test_rows_carry_their_rules():
    fields = DESCRIBED["rows"]
    assert fields["evidence"]["constraints"] == {
        "required": True,
        "enum": ["published", "simulated", "emulated", "measured"],
    }
    assert fields["bubble_fraction"]["constraints"] == {"minimum": 0, "maximum": 1}
    assert fields["peak_reserved_gib"]["constraints"] == {"minimum": 0}
    assert fields["chunks"]["constraints"] == {"minimum": 1}
    assert fields["clock_cycle"]["type"] == "boolean"


@pytest.mark.parametrize("rows", [Row, TransparencyRow, PeerRow])
def test_objects_of_rows_have_the_columns_and_types_of_their_table(rows):
    types = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}
    declared = {name: types[field["type"]] for name, field in TABLES[rows.TABLE].fields.items()}
    assert {field.name: field.type.removesuffix(" | None") for field in fields(rows)} == declared
    assert rows.columns() == TABLES[rows.TABLE].columns


def test_an_unknown_table_is_refused_with_what_is_nearest(tmp_path):
    header = [name for name in Row.columns() if name != "chunks"] + ["speed"]
    with pytest.raises(ConfigError) as caught:
        table_of(header, tmp_path / "a.csv")
    (problem,) = caught.value.problems
    assert "got those of rows without chunks; with speed" in problem


def test_the_committed_descriptor_is_that_of_the_files():
    written = json.loads((REFERENCE_FOLDER / DESCRIPTOR).read_text(encoding="utf-8"))
    assert written == describe_folder(REFERENCE_FOLDER), "run: python -m gpipe_bench datapackage write"


def test_every_reference_table_is_in_the_descriptor():
    written = json.loads((REFERENCE_FOLDER / DESCRIPTOR).read_text(encoding="utf-8"))
    listed = {resource["path"] for resource in written["resources"]}
    assert listed == {path.relative_to(REFERENCE_FOLDER).as_posix() for path in REFERENCE_FOLDER.rglob("*.csv")}
    assert "published/published.csv" in listed
    names = [resource["name"] for resource in written["resources"]]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[-a-z0-9._/]+", name) for name in names)


def test_every_reference_row_says_where_it_comes_from_or_leads_to_one_that_does():
    written = json.loads((REFERENCE_FOLDER / DESCRIPTOR).read_text(encoding="utf-8"))
    links = {resource["path"]: resource["schema"].get("foreignKeys") for resource in written["resources"]}
    for path in sorted(REFERENCE_FOLDER.glob("*/*/*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        # A configuration is what others lead to.
        if path.stem.endswith("_configurations"):
            continue
        if "commit" not in lines[0]:
            assert links[path.relative_to(REFERENCE_FOLDER).as_posix()], f"{path.relative_to(ROOT)} leads nowhere"
            continue
        # A simulation says the same whatever runs it and whenever.
        needed = ["evidence", "profile", "commit", "dirty", "schema_version"]
        needed += ["torch", "python", "started_utc"] if path.parent.parent.name == "measured" else []
        needed += ["config_sha256"]
        needed += ["torch"] if "torch" in lines[0] else []
        for line in lines:
            assert line["evidence"] == path.parent.parent.name
            # What was measured with another program names that program as its source.
            own = needed if not line.get("source") else ["evidence", "torch", "config_sha256", "schema_version"]
            missing = [name for name in own if not line[name]]
            assert missing == [], f"{path.relative_to(ROOT)}: {missing}"


@pytest.mark.parametrize("evidence", ["simulated", "emulated"])
def test_every_reference_row_in_virtual_time_says_how_it_trained(evidence):
    found = 0
    for path in sorted((REFERENCE_FOLDER / evidence).glob("*/*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        if {"cell", "schema_version"} <= lines[0].keys():
            found += len(lines)
            for name in ("steps_overlap", "precision", "optimizer"):
                assert all(line[name] for line in lines), f"{path.relative_to(ROOT)}: {name}"
    assert found


def test_every_companion_leads_to_its_rows():
    written = json.loads((REFERENCE_FOLDER / DESCRIPTOR).read_text(encoding="utf-8"))
    kinds = {header: kind for kind in TABLES.values() for header in kind.headers}
    for resource in written["resources"]:
        schema = resource["schema"]
        kind = kinds[tuple(field["name"] for field in schema["fields"])]
        declared = [tuple(key["fields"]) for key in schema.get("foreignKeys", [])]
        # Nobody ran a published row here, so that it has no configuration.
        expected = [] if resource["path"] == "published/rows.csv" else [link.columns for link in kind.links]
        assert declared == expected, resource["path"]


def test_every_table_says_its_evidence_or_leads_to_one_that_does():
    for path in sorted(REFERENCE_FOLDER.rglob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        folder = path.relative_to(REFERENCE_FOLDER).parts[0]
        companion = path.stem.endswith(COMPANION_SUFFIXES)
        assert companion or {line["evidence"] for line in lines} == {folder}, path.name


def test_every_run_can_be_looked_up_by_its_digest():
    """How a measurement was taken: threads, untimed and timed steps, seed; of a simulation hardware and optimizer."""
    for path in sorted(REFERENCE_FOLDER.glob("*/*/*_configurations.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            known = [json.loads(line["configuration"]) for line in csv.DictReader(file)]
        assert known, path.name
        if path.stem in ("ablation_configurations", "sweep_measured_configurations"):
            measured = path.parent.parent.name == "measured"
            names = {"threads", "warmup", "steps", "seed"} if measured else {"profile", "optimizer"}
            assert all(names <= set(one) for one in known), path.name


def test_rows_without_their_configurations_are_refused(tmp_path, table):
    table.with_name("ablation_configurations.csv").unlink()
    with pytest.raises(
        ConfigError, match=r"must lie beside its configurations, got ablation\.csv without ablation_con"
    ):
        describe_folder(table.parent)


def test_a_companion_without_its_rows_is_refused(tmp_path, table):
    (tmp_path / "alone").mkdir()
    steps = table.with_name("ablation_steps.csv").rename(tmp_path / "alone" / "ablation_steps.csv")
    with pytest.raises(ConfigError, match=rf"must lie beside its rows, got {steps.name} without ablation.csv"):
        describe_folder(tmp_path / "alone")


def test_the_same_files_give_the_same_bytes(package):
    first = (package / DESCRIPTOR).read_bytes()
    assert write_descriptor(package).read_bytes() == first


def test_a_folder_without_tables_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="folder must hold CSV tables, got none"):
        describe_folder(tmp_path)


def test_every_unreadable_table_is_named(package):
    (package / "published" / "settings.csv").write_bytes(b"\xff\xfe\x00")
    (package / "published" / "published.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError) as caught:
        describe_folder(package)
    assert len(caught.value.problems) == 2


def test_a_table_from_before_a_column_was_added_is_known(tmp_path):
    columns = TABLES["rows"].columns
    assert columns[-3:] == ("steps_overlap", "precision", "optimizer")
    for older in (columns[:-1], columns[:-2], columns[:-3]):
        assert table_of(older, tmp_path / "a.csv").columns == older
    with pytest.raises(ConfigError, match="without sweep_kind"):
        table_of([name for name in columns if name != "sweep_kind"], tmp_path / "a.csv")


@pytest.mark.parametrize("kind", TABLES.values(), ids=TABLES)
def test_columns_are_added_at_the_end(kind):
    added = [bool(field.get("added")) for field in kind.fields.values()]
    assert added == sorted(added)
