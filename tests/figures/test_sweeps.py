"""Figures of sweeps, published tables and advice: what they say, and that every text of them can be read."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.ablation import draw_ablation
from gpipe_bench.figures.advice import advice_figure
from gpipe_bench.figures.points import points_of, series_of
from gpipe_bench.figures.published_tables import draw_published_tables, printed_metric, published_tables_figure
from gpipe_bench.figures.reference import draw_reference, with_published
from gpipe_bench.figures.style import drawing
from gpipe_bench.figures.sweep import draw_sweep, machine_words, sweep_figure
from gpipe_bench.figures.why import explanation, why_figure
from gpipe_bench.results.catalogue import reference_figures
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES, ideal_bubble
from tests.figures.synthetic import ablation_row, write_rows
from tests.figures.test_layout import check, words

CHUNKS = (1, 2, 4, 8, 16, 32, 128)


def sweep_row(n, m, batch, mode="except_last", **changes):
    """An invented cell whose only loss is the ideal bubble."""
    bubble = ideal_bubble(m, n)
    throughput = 1234.5 * n * (1 - bubble)
    known = {
        "evidence": "simulated",
        "partitions": n,
        "chunks": m,
        "microbatches": m,
        "batch_size": batch,
        "checkpoint": mode,
        "balance": "-".join(["1"] * n),
        "throughput_samples_per_s": throughput,
        "step_time_ms": 1e3 * batch / throughput,
        "bubble_fraction": bubble,
        "recompute_fraction": 0.0 if mode == "never" else 0.2 * (1 - bubble),
        "copy_fraction": 0.0,
        "imbalance_fraction": 0.0,
        "device": "cuda Imaginary 9000",
    }
    return ablation_row("dep-str-ptl", **{**known, **changes})


def failed(row):
    return replace(row, status="oom", reason="device 0 needs 99 GiB", throughput_samples_per_s=None, step_time_ms=None)


def sweep(numbers=(1, 2, 4, 8, 16, 64)):
    rows = []
    for mode, n, m in product(CHECKPOINT_MODES, numbers, CHUNKS):
        sizes = dict.fromkeys((256, 8 * m))
        rows += [sweep_row(n, m, size, mode) for size in sizes]
    return [failed(row) if row.checkpoint == "never" and row.partitions < 8 else row for row in rows]


def measured_sweep():
    return [
        sweep_row(n, m, 8, evidence="measured", repeat=k, device="cpu Imaginary 9000")
        for n, m, k in product((1, 2, 4), (1, 2, 4, 8), range(2))
    ]


def published(**changes):
    known = {"evidence": "published", "throughput_samples_per_s": 20.0, "repeat": None, **changes}
    return ablation_row("dep-str-ptl", **known)


def test_a_series_is_a_batch_or_a_microbatch_with_several_numbers_of_chunks():
    series = series_of(points_of(sweep()))
    assert [(one.fixed, one.size, list(one.points)) for one in series] == [
        ("batch", 256, list(CHECKPOINT_MODES)),
        ("micro-batch", 8, list(CHECKPOINT_MODES)),
    ]
    # The cell of 32 chunks belongs to both.
    assert all(len(points) == 6 * len(CHUNKS) for one in series for points in one.points.values())


def test_a_point_is_the_median_of_its_repeats():
    rows = [sweep_row(2, 4, 8, throughput_samples_per_s=value, repeat=k) for k, value in enumerate((1.0, 5.0, 9.0))]
    (point,) = points_of(rows)
    assert point.throughput == 5.0


def test_the_parts_of_device_time_add_up_and_the_ideal_is_their_sum_where_nothing_else_is_lost():
    (point,) = points_of([sweep_row(4, 8, 256)])
    assert sum(point.shares.values()) == pytest.approx(1.0)
    assert point.ideal_ms == pytest.approx(point.device_ms)


@pytest.mark.parametrize("draw", [sweep_figure, why_figure])
@pytest.mark.parametrize("rows", [sweep, measured_sweep, lambda: [*sweep((1, 2)), *measured_sweep()]])
def test_texts_of_a_sweep_are_legible(draw, rows, texts_of):
    with drawing():
        figure = draw(rows())
        check(figure, texts_of(figure))


def test_the_map_shows_every_value_and_what_does_not_fit(texts_of):
    with drawing():
        figure = sweep_figure(sweep())
    assert len(figure.axes) == 6
    numbers = [sum(text.get_text()[0].isdigit() for text in axes.texts) for axes in figure.axes]
    assert numbers == [42, 42, 21, 42, 42, 21]
    assert "simulated" in words(texts_of(figure))


@pytest.mark.parametrize(("hosts", "words"), [(1, "on 1 host with"), (2, "on 2 hosts with")])
def test_a_sweep_of_processes_says_where_they_are(hosts, words):
    place = {"processes": 4, "hosts": hosts, "schedule": "1f1b", "device": "cpu X", "model_args": "L=6"}
    assert (
        machine_words(sweep_row(4, 8, 32, **place))
        == f"L=6; a process for each device, {words} cpu X; dep-str-ptl; 1f1b"
    )


def test_the_sentence_names_what_the_time_goes_into():
    points = points_of([sweep_row(n, 32, 256) for n in (1, 2, 4)])
    text = explanation(("partitions", "n"), points)
    assert text.startswith("From 1 to 4 the cost of a sample rises 1.09")
    assert "bubble 100%" in text
    down = explanation(("micro-batches", "chunks"), points_of([sweep_row(4, m, 8 * m) for m in (1, 4, 16)]))
    assert down.startswith("From 1 to 16 the cost of a sample falls 3.37")
    assert explanation(("partitions", "n"), points_of([failed(sweep_row(1, 1, 8))])) == "Nothing fits the memory."


def tables():
    rows = []
    for n, m, speed in ((1, 1, 20.0), (2, 32, 35.5), (8, 32, 140.0)):
        setting = {"partitions": n, "chunks": m, "balance": str(n)}
        rows += [published(**setting, throughput_samples_per_s=speed, peak_reserved_gib=None)]
        rows += [sweep_row(n, m, 32, throughput_samples_per_s=speed * 1.1, balance=str(n))]
    return [*rows[:-1], failed(rows[-1])]


def test_a_published_table_shows_the_error_of_each_row(texts_of):
    with drawing():
        figure = published_tables_figure(tables(), "throughput_samples_per_s")
        shown = texts_of(figure)
        check(figure, shown)
    text = words(shown)
    assert text.count("+10.0%") == 2
    assert "simulated: oom" in text


def test_the_metric_that_was_printed_is_drawn(tmp_path):
    rows = [published(throughput_samples_per_s=None, peak_reserved_gib=3.0)]
    assert printed_metric(rows) == "peak_reserved_gib"
    assert printed_metric(tables()) == "throughput_samples_per_s"
    path = write_rows(tmp_path / "rows.csv", tables())
    with pytest.raises(ConfigError, match="metric must be one of throughput_samples_per_s"):
        draw_published_tables(path, tmp_path / "x", "speed")


def variants():
    return [ablation_row(label) for label in ("baseline", "dep-x-x", "dep-str-ptl")]


@pytest.mark.parametrize(
    ("draw", "rows", "message"),
    [
        (draw_published_tables, variants(), "must have one variant for each setting, got 3 for one; draw the ablation"),
        (draw_sweep, variants(), "got one for each of 3 variants; draw the ablation of them"),
        (draw_ablation, sweep((1, 2)), "must have several variants of a setting, got one for each of 26 settings"),
    ],
)
def test_rows_of_another_kind_of_figure_are_refused(tmp_path, draw, rows, message):
    path = write_rows(tmp_path / "rows.csv", rows)
    with pytest.raises(ConfigError, match=message) as refused:
        draw(path, tmp_path / "figure")
    assert len(refused.value.problems) == 1
    assert [*tmp_path.iterdir()] == [path]


def test_one_variant_is_a_sweep_and_an_ablation(tmp_path):
    path = write_rows(tmp_path / "rows.csv", variants()[:1])
    assert draw_sweep(path, tmp_path / "sweep")
    assert draw_ablation(path, tmp_path / "ablation")


def test_advice_names_the_recommended_choice(texts_of):
    rows = [row for row in sweep((1, 2, 4, 8)) if row.batch_size == 256]
    rows += [sweep_row(8, 128, 256, "always", balance="2-1-1-1-1-1-1-1", throughput_samples_per_s=5000.0)]
    with drawing():
        figure = advice_figure(rows)
        shown = texts_of(figure)
        check(figure, shown)
    assert "Recommended: 8 devices, 128 chunks, checkpoint" in words(shown)
    assert len(figure.axes) == 3


def test_advice_where_nothing_fits(texts_of):
    with drawing():
        figure = advice_figure([failed(sweep_row(1, 1, 8))])
        assert "Nothing that was tried fits the memory" in words(texts_of(figure))


def test_published_rows_stand_beside_simulated_ones_of_their_setting():
    simulated = sweep_row(4, 8, 32, balance="3-4-5-6")
    other = published(chunks=16)
    assert with_published([simulated], [published(), other]) == [published(), simulated]
    assert with_published([replace(simulated, evidence="measured")], [published()])[0].evidence == "measured"


def test_reference_figures_are_drawn_from_the_tables_that_are_there(tmp_path):
    folder = tmp_path / "reference"
    for place in ("simulated/p40", "measured/box", "published"):
        (folder / place).mkdir(parents=True)
    write_rows(folder / "published/rows.csv", [published()])
    write_rows(folder / "simulated/p40/speed.csv", [sweep_row(4, 8, 32, balance="3-4-5-6")])
    write_rows(folder / "measured/box/sweep_measured.csv", measured_sweep())
    names = [f"{figure.place}/{figure.name}" for figure in reference_figures(folder)]
    assert names == ["measured-box/sweep_measured", "measured-box/why_measured", "simulated-p40/speed"]
    made = [path for paths in draw_reference(tmp_path / "out", folder) for path in paths]
    assert made == [path for figure in reference_figures(folder) for path in figure.paths(tmp_path / "out")]
    assert all(path.stat().st_size for path in made)


def test_a_reference_without_tables(tmp_path):
    with pytest.raises(ConfigError, match="reference must hold tables of rows"):
        list(draw_reference(tmp_path, tmp_path))
