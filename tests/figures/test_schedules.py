"""Figures of the experiment of schedules: which cells are on the front, which panels there are, what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpipe_bench.components import Components
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.base import Selection
from gpipe_bench.figures.schedule_bubbles import BUBBLES, settings_of
from gpipe_bench.figures.schedule_timelines import STEPS, ScheduleStep
from gpipe_bench.figures.schedules import MARKS, PARETO, SCALING, ScheduleCell, pareto, read_cells
from gpipe_bench.figures.style import drawing
from gpipe_bench.results.catalogue import reference_figures
from gpipe_bench.results.rows import Row
from gpipe_bench.schedules import SCHEDULES, named_schedule
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from tests.figures.marks import cut
from tests.figures.synthetic import step_events, write_csv, write_rows
from tests.figures.test_layout import check


def row(schedule="1f1b", devices=2, **changes):
    """An invented row of a schedule."""
    n = devices * (2 if schedule in TWO_PER_DEVICE else 1)
    known = {"model": "testnet", "variant": "dep-str-ptl", "backward": "scheduled", "evidence": "simulated"}
    known |= {"profile": "h9", "partitions": n, "chunks": 4, "microbatches": 4, "checkpoint": "never", "batch_size": 8}
    known |= {"throughput_samples_per_s": 10.0, "step_time_ms": 800.0, "repeat": 0, "device": "cuda H9"}
    known |= {"bubble_fraction": 0.25, "copy_fraction": 0.05, "imbalance_fraction": 0.1, "balance": "1"}
    known |= {name: getattr(Components(), name) for name in Components.switched()}
    return Row(**{**known, "schedule": schedule, "cell": f"{schedule}-{n}", **changes})


def cell(throughput, memory, schedule="1f1b", devices=2, **changes):
    return ScheduleCell(row(schedule, devices, throughput_samples_per_s=throughput, **changes), memory)


def everything():
    cells = [cell(10.0 + k, 5.0 + k, name, p) for k, name in enumerate(SCHEDULES) for p in (2, 4, 8)]
    return cells + [cell(9.0 + k, 3.0, name, 4, chunks=8) for k, name in enumerate(SCHEDULES)]


def test_the_front_has_the_cells_that_no_other_one_beats():
    cells = [cell(5, 2), cell(9, 4), cell(8, 4), cell(9, 5), cell(4, 3), cell(12, 9)]
    assert [(one.throughput, one.memory_gib) for one in pareto(cells)] == [(5, 2), (9, 4), (12, 9)]


def test_a_cell_has_the_memory_of_its_fullest_device(tmp_path):
    rows = [row(cell="a"), row("zb_v", cell="b"), row(cell="c", status="oom", reason="full")]
    path = write_rows(tmp_path / "schedules.csv", rows)
    peaks = [("a", 0, 2.0), ("a", 1, 3.0), ("b", 0, 1.0)]
    records = [
        {"cell": name, "variant": "x", "repeat": 0, "partition": j, "peak_reserved_gib": peak}
        for name, j, peak in peaks
    ]
    write_csv(tmp_path / "schedules_devices.csv", records[0], records)
    assert [(one.row.cell, one.memory_gib, one.devices) for one in read_cells(path)] == [("a", 3.0, 2), ("b", 1.0, 2)]


def test_precisions_have_panels_of_their_own():
    half = {"precision": "bfloat16", "optimizer": "adamw"}
    cells = [cell(5, 2, precision="float32", optimizer="sgd"), cell(4, 2), cell(9, 1, **half)]
    panels = [panel for line in PARETO.panels(cells, 7.0) if isinstance(line, list) for panel in line]
    shown = {
        data[0]: [one.throughput for one in data[1]]
        for data in (panel.data for panel in panels)
        if isinstance(data, tuple)
    }
    assert shown["testnet, h9"] == [5, 4]
    assert shown["testnet, h9\nbfloat16, adamw"] == [9]
    settings = settings_of([row("gpipe"), row("gpipe", **half)])
    assert [setting.title.partition("\n")[0] for setting in settings] == ["testnet, h9", "testnet, h9, bfloat16, adamw"]


def test_idle_shares_stand_beside_the_formula():
    emulated = row("gpipe", evidence="emulated", bubble_fraction=0.2)
    rows = [row("gpipe"), emulated, row("1f1b", 4), row(evidence="measured", profile="quiet-box", processes=2)]
    one, other = settings_of(rows)
    ideal = 1 / 5
    assert one.idle["formula"] == {"gpipe": pytest.approx(ideal)}
    assert {kind: values["gpipe"] for kind, values in one.idle.items() if kind != "formula"} == {
        "simulated": pytest.approx(0.4),
        "emulated": pytest.approx(0.35),
    }
    assert set(other.idle) == {"measured, processes", "formula"}
    assert other.title.startswith("testnet, quiet-box\n")


def test_the_formula_of_one_step_stands_beside_steps_that_do_not_overlap():
    apart = row("zb_h2", steps_overlap=False, bubble_fraction=0.5, copy_fraction=0.0, imbalance_fraction=0.0)
    (panel,) = settings_of([row("zb_h2", steps_overlap=True), apart])
    assert panel.idle["simulated"] == {"zb_h2": 0.5}


def test_the_figure_says_which_steps_it_compares(texts_of):
    def words(*rows):
        # Those of earlier figures come first.
        shown = [" ".join(text.get_text().split()) for text, _ in texts_of(BUBBLES.canvas(list(rows)))]
        return [text for text in shown if text.startswith("Steps")][-1]

    both = [row("gpipe", steps_overlap=overlap) for overlap in (True, False)]
    assert words(*both).startswith("Steps do not overlap: each ends on all devices, as in the formula. Formula:")
    assert words(row("gpipe", evidence="measured")).startswith("Steps do not overlap")
    assert words(both[0]).startswith("Steps overlap, but the formula is of one alone. Formula:")


def test_recomputation_counts_in_the_formula():
    (panel,) = settings_of([row("gpipe", evidence="emulated", checkpoint="always")])
    # T_F = T_B = T_W: the last partition recomputes at once, and so do the others before the gradient arrives.
    assert panel.idle["formula"]["gpipe"] < 1 / 5


FIGURES = {
    "pareto": lambda: PARETO.canvas(everything()),
    "scaling": lambda: SCALING.canvas(everything()),
    "bubbles": lambda: BUBBLES.canvas([*(one.row for one in everything()), row(devices=4, evidence="emulated")]),
    "timelines": lambda: STEPS.canvas([
        ScheduleStep(cell(10.0, 2.0, name), step_events(4, named_schedule(name, 1, n, 2).partitions, copies=False))
        for name in SCHEDULES
        for n in (4 if name in TWO_PER_DEVICE else 2,)
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_fits_both_columns_of_a_page(name, texts_of):
    with drawing():
        figure = FIGURES[name]()
        check(figure, texts_of(figure))
        assert figure.get_figheight() <= 5


@pytest.mark.parametrize("name", FIGURES)
def test_the_edge_of_the_axes_cuts_no_mark(name):
    with drawing():
        assert cut(FIGURES[name]()) == []


def test_a_step_that_begins_before_the_last_one_ended_is_drawn_whole(texts_of):
    early = [replace(event, start_us=event.start_us - 3000.0) for event in step_events(4, 2, copies=False)]
    with drawing():
        figure = STEPS.canvas([ScheduleStep(cell(10.0, 2.0, name), early) for name in ("gpipe", "1f1b", "zb_h1")])
        assert cut(figure) == []
        texts = [text.get_text() for text, _ in texts_of(figure)]
    assert any("what begins before 0 ran while other devices ended the step before" in text for text in texts)
    # Each of both columns has the numbers of its axis at its end.
    assert texts.count("time (ms)") == 2


def test_rows_of_steps_are_equally_far_apart():
    steps = [ScheduleStep(cell(10.0, 2.0, name), step_events(4, 2, copies=False)) for name in [*SCHEDULES][:5]]
    with drawing():
        figure = STEPS.canvas(steps)
    tops = sorted({round(axes.get_position().y1, 3) for axes in figure.axes if axes.axison})
    assert len(tops) == 3
    assert tops[2] - tops[1] == pytest.approx(tops[1] - tops[0], abs=0.005)


def test_a_short_axis_of_memory_has_more_than_one_number(texts_of):
    with drawing():
        figure = PARETO.canvas([cell(5, 11), cell(7, 16), cell(9, 27)])
        assert {"15", "20"} <= {text.get_text() for text, _ in texts_of(figure)}


def test_a_panel_says_the_microbatches_of_its_front(texts_of):
    def words(cells):
        with drawing():
            return [text.get_text() for text, _ in texts_of(PARETO.canvas(cells))]

    one = [cell(5, 2, chunks=4), cell(9, 4, chunks=4), cell(8, 5, chunks=64)]
    assert "testnet, h9\nm = 4" in words(one)
    two = [*one, cell(12, 9, chunks=64)]
    assert "testnet, h9\nm = 4 | 64" in words(two)


def test_scaling_says_from_how_many_devices_on_zero_bubble_is_ahead(texts_of):
    def words(*gains):
        cells = [cell(10.0, 1.0, "1f1b", p) for p in (2, 4, 8)]
        cells += [cell(10.0 * gain, 1.0, "zb_h1", p) for p, gain in zip((2, 4, 8), gains, strict=True)]
        with drawing():
            return [text.get_text() for text, _ in texts_of(SCALING.canvas(cells))]

    ahead = words(0.9, 1.1, 1.25)
    assert "testnet, h9\nzero-bubble ahead from 4 on" in ahead
    assert any("beat 1F1B by 25" in text for text in ahead)
    behind = words(1.3, 1.1, 0.9)
    assert "testnet, h9\nzero-bubble not ahead" in behind[len(ahead) :]
    assert not any("beat 1F1B" in text for text in behind[len(ahead) :])


def test_panels_of_several_micro_batches_say_their_own(texts_of):
    def words(*counts):
        cells = [
            cell(10.0, 1.0, name, p, chunks=m, model=f"net{m}")
            for m in counts
            for name in ("1f1b", "zb_h1")
            for p in (2, 4)
        ]
        with drawing():
            return " ".join(text.get_text() for text, _ in texts_of(SCALING.canvas(cells)))

    both = words(16, 64)
    one = words(16)[len(both) :]
    assert "net16, h9, m = 16\n" in both
    assert "net64, h9, m = 64\n" in both
    assert "16 micro-batches, checkpoint never" in one
    assert "m = 16" not in one


def test_marks_of_schedules_differ_in_shape_and_colour():
    assert len({mark.shape for mark in MARKS.values()}) == len({mark.colour for mark in MARKS.values()}) == len(MARKS)


def test_the_reference_has_a_figure_for_each_table(tmp_path):
    for place, name in (
        ("simulated/p40", "schedules"),
        ("simulated/p40", "schedules_timelines"),
        ("emulated/p40", "schedules"),
    ):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        write_rows(tmp_path / place / f"{name}.csv", [row()])
    names = [f"{figure.place}/{figure.name}" for figure in reference_figures(tmp_path)]
    assert names == [
        "emulated-p40/schedules_bubbles",
        "simulated-p40/schedules_pareto",
        "simulated-p40/schedules_scaling",
        "simulated-p40/schedules_timelines",
    ]


def test_emulated_cells_stand_beside_the_simulated_ones_of_the_same_hardware(tmp_path):
    for evidence in ("simulated", "emulated"):
        folder = tmp_path / evidence / "p40"
        folder.mkdir(parents=True)
        path = write_rows(folder / "schedules.csv", [row("gpipe", evidence=evidence, cell="a")])
        records = [{"cell": "a", "repeat": 0, "peak_reserved_gib": 1.0}]
        write_csv(path.with_name("schedules_devices.csv"), records[0], records)
    assert [one.evidence for one in BUBBLES.read(path, Selection("emulated"))] == ["emulated", "simulated"]
    with pytest.raises(ConfigError, match="table must have measured rows that ended well, got none"):
        BUBBLES.read(path, Selection("measured"))
