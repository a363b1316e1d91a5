"""Figures of sweeps, published tables and advice: what they say, and that every text of them can be read."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.ablation import ABLATION
from gpipe_bench.figures.advice import ADVICE
from gpipe_bench.figures.base import Selection
from gpipe_bench.figures.points import points_of, series_of
from gpipe_bench.figures.published_tables import TABLES
from gpipe_bench.figures.style import drawing
from gpipe_bench.figures.sweep import SWEEP, machine_words
from gpipe_bench.figures.tables import read_beside, read_rows
from gpipe_bench.figures.why import WHY, charts
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
        "device_count": n,
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


@pytest.mark.parametrize("figure", [SWEEP, WHY])
@pytest.mark.parametrize("rows", [sweep, measured_sweep, lambda: [failed(row) for row in sweep()]])
def test_texts_of_a_sweep_are_legible(figure, rows, texts_of):
    with drawing():
        canvas = figure.canvas(rows())
        check(canvas, texts_of(canvas))


def test_the_map_shows_every_value_and_what_does_not_fit():
    with drawing():
        figure = SWEEP.canvas(sweep())
    maps = [axes for axes in figure.axes if axes.axison]
    numbers = [sum(text.get_text()[:1].isdigit() for text in axes.texts) for axes in maps]
    assert numbers == [42, 42, 21, 42, 42, 21]
    assert sum(text.get_text() == "-" for axes in maps for text in axes.texts) == 42


def test_memory_stands_below_throughput_where_rows_have_it(texts_of):
    rows = [replace(row, peak_reserved_gib=0.5 * row.partitions) for row in sweep((1, 2)) if row.batch_size == 256]
    with drawing():
        figure = SWEEP.canvas(rows)
        shown = texts_of(figure)
        check(figure, shown)
    maps = [axes for axes in figure.axes if axes.axison]
    below = [text.get_text() for axes in maps[len(maps) // 2 :] for text in axes.texts]
    assert {*below} <= {"0.500", "1.00", "-"}
    assert "1.00" in below
    assert "trains fastest with 2 partitions" in words(shown)


def test_what_has_no_value_at_all_is_left_out_and_named(texts_of):
    rows = [failed(row) if row.chunks == 32 else row for row in sweep((1, 2)) if row.batch_size == 256]
    with drawing():
        figure = SWEEP.canvas(rows)
        shown = words(texts_of(figure))
    assert "Not drawn, since no step fits the memory: 32 micro-batches." in shown
    ticks = [tick.get_text() for axes in figure.axes if axes.axison for tick in axes.get_xticklabels()]
    assert "32" not in ticks


@pytest.mark.parametrize(("hosts", "words"), [(1, "on 1 host with"), (2, "on 2 hosts with")])
def test_a_sweep_of_processes_says_where_they_are(hosts, words):
    place = {"processes": 4, "hosts": hosts, "schedule": "1f1b", "device": "cpu X", "model_args": "L=6"}
    assert (
        machine_words(sweep_row(4, 8, 32, **place))
        == f"L=6; a process for each device, {words} cpu X; dep-str-ptl; 1f1b"
    )


def test_charts_without_values_are_left_out():
    large = [failed(row) if row.batch_size == 256 and row.chunks != 32 else row for row in sweep()]
    assert [title for title, _, _ in charts(series_of(points_of(large)))] == [
        "32 chunks, batch of 256 samples, except_last",
        "8 partitions, micro-batch of 8 samples, except_last",
    ]


def tables():
    rows = []
    for n, m, speed in ((1, 1, 20.0), (2, 32, 35.5), (8, 32, 140.0)):
        setting = {"partitions": n, "chunks": m, "balance": str(n)}
        rows += [published(**setting, throughput_samples_per_s=speed, peak_reserved_gib=None)]
        rows += [sweep_row(n, m, 32, throughput_samples_per_s=speed * 1.1, balance=str(n))]
    return [*rows[:-1], failed(rows[-1])]


def test_a_published_table_shows_the_error_of_each_row(texts_of):
    with drawing():
        figure = TABLES.canvas(tables())
        shown = texts_of(figure)
        check(figure, shown)
    text = words(shown)
    assert text.count("+10.0%") == 2
    assert "simulated: oom" in text
    assert "Right: simulated over published, minus 1; then both over the first row" in text
    assert "1.00, 1.00\u00d7" in text
    assert "n: partitions, m: micro-batches." in text


def test_an_emulated_table_shows_the_error_of_emulated_values(texts_of):
    rows = [*tables()[:4], *(replace(row, evidence="emulated", throughput_samples_per_s=71.0) for row in tables()[3:4])]
    with drawing():
        text = words(texts_of(TABLES.canvas(rows)))
    assert "+100.0%" in text
    assert "Right: emulated over published" in text


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ((1.1, 1.2), "simulated throughput is 10.0 to 20.0 % above the published"),
        ((0.9, 0.7), "simulated throughput is 10.0 to 30.0 % below the published"),
        ((0.9, 1.3), "simulated throughput is from 10.0 % below to 30.0 % above the published"),
        ((1.1, 1.1), "simulated throughput is 10.0 % above the published"),
    ],
)
def test_a_title_says_how_far_values_are_from_the_published(texts_of, ratios, words):
    rows = []
    for n, ratio in zip((2, 4), ratios, strict=True):
        setting = {"partitions": n, "chunks": 32, "balance": str(n)}
        rows.append(published(**setting, throughput_samples_per_s=20.0, peak_reserved_gib=None, device="cuda H9"))
        rows.append(sweep_row(n, 32, 32, throughput_samples_per_s=20.0 * ratio, balance=str(n), device="cuda H9"))
    with drawing():
        shown = " ".join(text.get_text() for text, _ in texts_of(TABLES.canvas(rows))).replace("\u00a0", " ")
    assert words in shown
    # Values of one device name it once.
    assert shown.count("cuda H9") == 1


def test_the_metric_that_was_published_is_drawn(texts_of):
    with drawing():
        text = words(texts_of(TABLES.canvas([published(throughput_samples_per_s=None, peak_reserved_gib=3.0)])))
    assert "memory reserved, all devices (GiB)" in text


def test_a_table_says_why_a_small_model_does_not_fit_where_larger_ones_do(texts_of):
    fits = published(model_args="L=18;D=416", chunks=128, checkpoint="except_last", peak_reserved_gib=4.4)
    small = replace(failed(fits), model_args="L=18;D=208", chunks=1, checkpoint="never", peak_reserved_gib=None)
    why = "oom: the whole batch at once, without checkpoints; larger models run in micro-batches with checkpoints."
    with drawing():
        shown = [words(texts_of(TABLES.canvas(rows))) for rows in ([fits], [fits, small])]
    assert [why in text for text in shown] == [False, True]


def test_a_table_of_sizes_has_the_printed_number_of_parameters(texts_of):
    sizes = [
        published(model="unet", model_args=f"depth=5;B={b};C=160", partitions=b // 6, peak_reserved_gib=9.0)
        for b in (24, 48)
    ]
    with drawing():
        text = words(texts_of(TABLES.canvas([replace(row, throughput_samples_per_s=None) for row in sizes])))
    assert "n=4 (24, 160) 7.80B" in text
    assert "n=8 (48, 160) 15.8B" in text
    assert "n: partitions." in text


def variants():
    return [ablation_row(label) for label in ("baseline", "dep-x-x", "dep-str-ptl")]


@pytest.mark.parametrize(
    ("figure", "rows", "message"),
    [
        (TABLES, variants(), "must have one variant for each setting, got 3 for one; draw the ablation"),
        (SWEEP, variants(), "got one for each of 3 variants; draw the ablation of them"),
        (ABLATION, sweep((1, 2)), "must have several variants of a setting, got one for each of 26 settings"),
        (SWEEP, [published()], "evidence must be of a kind that the rows have, got 'simulated'; use one of published"),
    ],
)
def test_rows_of_another_kind_of_figure_are_refused(tmp_path, figure, rows, message):
    path = write_rows(tmp_path / "rows.csv", rows)
    with pytest.raises(ConfigError, match=message) as refused:
        figure.draw(path, tmp_path / "figure", Selection("simulated" if "evidence" in message else ""))
    assert len(refused.value.problems) == 1
    assert [*tmp_path.iterdir()] == [path]


def test_one_variant_is_a_sweep_and_an_ablation(tmp_path):
    path = write_rows(tmp_path / "rows.csv", variants()[:1])
    assert SWEEP.draw(path, tmp_path / "sweep")
    assert ABLATION.draw(path, tmp_path / "ablation")


def test_advice_names_the_best_choice(texts_of):
    rows = [row for row in sweep((1, 2, 4, 8)) if row.batch_size == 256]
    rows += [sweep_row(8, 128, 256, "always", balance="2-1-1-1-1-1-1-1", throughput_samples_per_s=5000.0)]
    with drawing():
        figure = ADVICE.canvas(rows)
        shown = texts_of(figure)
        check(figure, shown)
    assert "fastest with the paper's executor on 8 devices, 128 chunks, checkpoint" in words(shown)


def test_advice_does_not_pool_schedules_and_counts_devices(texts_of):
    speeds = {"1f1b": (4, 100.0), "zb_h2": (4, 140.0), "interleaved": (8, 180.0), "zb_v": (8, 160.0)}
    rows = [
        sweep_row(n, 16, 256, schedule=name, backward="scheduled", device_count=4, balance="-".join(["1"] * n),
                  throughput_samples_per_s=speed)
        for name, (n, speed) in speeds.items()
    ]  # fmt: skip
    rows += [sweep_row(2, 16, 256, device_count=2, throughput_samples_per_s=60.0)]
    with drawing():
        figure = ADVICE.canvas(rows)
        shown = texts_of(figure)
        check(figure, shown)
    said = words(shown)
    assert "fastest with interleaved on 4 devices, 16 chunks, checkpoint except_last" in said
    assert "180 samples/s, balance 1-1-1-1-1-1-1-1" in said
    ticks = {axes.get_xlabel(): [tick.get_text() for tick in axes.get_xticklabels()] for axes in figure.axes}
    assert ticks["devices, each at its fastest"] == ["2", "4"]
    (bars,) = ([tick.get_text() for tick in axes.get_yticklabels()] for axes in figure.axes if axes.patches)
    assert bars == ["interleaved", "zb_v", "zb_h2", "1f1b", "paper's executor"]


def test_the_advice_of_the_reference_is_its_fastest_row(texts_of):
    rows = read_rows(REFERENCE_FOLDER / "simulated" / "p40" / "advice_unet.csv")
    best = max((row for row in rows if row.status == "ok"), key=lambda row: row.throughput_samples_per_s)
    with drawing():
        figure = ADVICE.canvas(rows)
        shown = texts_of(figure)
        check(figure, shown)
    said = words(shown)
    where = f"{best.schedule} on {best.device_count} devices, {best.chunks} chunks, checkpoint {best.checkpoint}"
    assert f"fastest with {where}" in said
    assert f"{best.throughput_samples_per_s:.0f} samples/s, balance {best.balance}" in said


@pytest.mark.parametrize("figure", [SWEEP, WHY])
def test_a_sweep_does_not_pool_schedules(figure, texts_of):
    rows = [
        sweep_row(n, m, 256, schedule=name, backward="scheduled", device_count=4, balance=str(n),
                  throughput_samples_per_s=speed * m)
        for (name, n, speed), m in product((("1f1b", 4, 10.0), ("interleaved", 8, 30.0)), (2, 4))
    ]  # fmt: skip
    with drawing():
        canvas = figure.canvas(rows)
        shown = texts_of(canvas)
        check(canvas, shown)
    assert "up to one cuda Imaginary 9000 per partition; dep-str-ptl; 1f1b" in words(shown)
    assert "up to one cuda Imaginary 9000 per two partitions; dep-str-ptl; interleaved" in words(shown)


def test_device_time_counts_devices_and_an_unknown_ideal_is_left_out():
    row = sweep_row(8, 4, 256, schedule="interleaved", backward="scheduled", device_count=4, step_time_ms=64.0)
    (point,) = points_of([row])
    assert (point.device_ms, point.ideal_ms) == (1.0, None)


def test_advice_where_nothing_fits(texts_of):
    with drawing():
        figure = ADVICE.canvas([failed(sweep_row(1, 1, 8))])
        assert "nothing that was tried fits the memory" in words(texts_of(figure))


def test_rows_stand_beside_those_that_they_are_compared_with(tmp_path):
    simulated = sweep_row(4, 8, 32, balance="3-4-5-6")
    old, emulated = replace(simulated, flavour="published"), replace(simulated, evidence="emulated")
    printed, current = published(), replace(simulated, flavour="current")
    path = write_rows(tmp_path / "rows.csv", [printed, published(chunks=16), old, current, emulated])
    assert read_beside(path, Selection("simulated")) == [printed, old]
    assert read_beside(path, Selection("emulated")) == [printed, current, emulated]
