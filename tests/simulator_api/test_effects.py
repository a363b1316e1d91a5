"""The table of effects: every mechanism can be left out, and the document holds what the command gives."""

from __future__ import annotations

import pytest

from gpipe_bench.components import Components
from gpipe_bench.simulator.clock.run import Settings
from gpipe_bench.simulator.effects import COLUMNS, DOCUMENT, MARKERS, MECHANISMS, effects, table, with_table
from gpipe_bench.simulator.hardware.profile import load_profile
from gpipe_bench.simulator.workloads.build import Model, build_workload

P40 = load_profile("p40")
CELLS = COLUMNS[1:]


@pytest.fixture(scope="module")
def written():
    """The table in the document: name -> column -> text."""
    first, last = MARKERS
    lines = DOCUMENT.read_text(encoding="utf-8").split(first)[1].split(last)[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert tuple(rows[0]) == COLUMNS
    return {row[0]: dict(zip(CELLS, row[1:], strict=True)) for row in rows[2:]}


def test_the_document_has_a_row_for_each_mechanism(written):
    names = [mechanism.name for mechanism in MECHANISMS]
    assert list(written) == ["nothing: error of the simulator", *names], "run python -m gpipe_bench.simulator.effects"


def test_the_document_holds_what_the_command_gives(written, monkeypatch):
    """Two cells of the ablation again; a few points are left for constants that were fitted anew."""
    cells = {"dep-x-x": ("ablation", "dep-x-x", "throughput_samples_per_s")}
    kept = [
        mechanism for mechanism in MECHANISMS if mechanism.name in ("time of copies", "second socket: one link for all")
    ]
    monkeypatch.setattr("gpipe_bench.simulator.effects._CELLS", cells)
    monkeypatch.setattr("gpipe_bench.simulator.effects.MECHANISMS", kept)
    found = dict(effects(P40))
    assert len(found) == 3
    for name, shares in found.items():
        assert float(written[name]["dep-x-x"] or 0) == pytest.approx(100 * shares["dep-x-x"], abs=3)
    assert found["time of copies"]["dep-x-x"] > 0.1


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_a_mechanism_changes_something(mechanism, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "effects"
    model = Model("unet", {"depth": 1, "B": 1, "C": 8, "size": 16})
    work = build_workload(model, balance=[8, 9], batch_size=4, profile=P40, cache=cache)
    settings = Settings(Components(), "except_last", "published")
    changed = (mechanism.profile(P40), mechanism.work(work), mechanism.settings(settings), mechanism.metric)
    assert sum(a != b for a, b in zip(changed, (P40, work, settings, "peak_reserved"), strict=True)) == 1


def test_a_change_is_in_percent_and_a_small_one_is_left_out():
    first, second = (dict.fromkeys(CELLS, share) for share in (0.0012, 0.123))
    made = table({"nothing": first, "little": first, "much": second, "none": dict.fromkeys(CELLS)})
    lines = made.splitlines()
    assert lines[2].split("|")[2].strip() == "+0.1"
    assert lines[3].replace("|", "").strip() == "little"
    assert lines[4].count("+12.3") == len(CELLS)
    assert lines[5].count("oom") == len(CELLS)


def test_only_what_is_between_the_markers_is_replaced():
    first, last = MARKERS
    assert with_table(f"a\n{first}\nold\n{last}\nb", "new") == f"a\n{first}\nnew\n{last}\nb"
    with pytest.raises(ValueError, match="must have the markers"):
        with_table("a", "new")
