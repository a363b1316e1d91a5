"""Efficiencies from measured rows: those that made the rows are found again, with a spread and an error per cell."""

from __future__ import annotations

import pytest

from gpipe_bench.cli import main
from gpipe_bench.errors import ConfigError
from gpipe_bench.rows import Row
from gpipe_bench.simulator import Model, simulate
from gpipe_bench.simulator.calibration import SHARES, calibrate_rows
from gpipe_bench.simulator.hardware.profile import load_profile, parse_profile
from gpipe_bench.tables import csv_text

H100 = load_profile("h100").model_copy(update={"kernels": None})
TRUTH = {"conv3x3_stride1": 0.2, "other_conv_matmul": 0.33, "memory_bound": 0.7}
CELLS = (
    ("unet", {"depth": 2, "B": 1, "C": 64, "size": 64}, 64),
    ("unet", {"depth": 1, "B": 2, "C": 128, "size": 64}, 64),
    ("amoebanet-d", {"L": 3, "D": 512, "size": 64}, 512),
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def rows(cache):
    """What a device of other efficiencies than the profile's would have measured."""
    return [row for cell in CELLS for row in _measured(*cell, cache)]


def _measured(name, arguments, batch_size, cache):
    efficiency = H100.efficiency.model_copy(update=TRUTH)
    truth = H100.model_copy(update={"efficiency": efficiency, "memory_gib": 1e3})
    layers = len(_build(name, arguments))
    step = simulate(
        Model(name, arguments), balance=[layers], batch_size=batch_size, chunks=2, profile=truth, steps=1, cache=cache
    )
    return [step.row(evidence="measured", device="cuda H100", repeat=repeat) for repeat in range(2)]


def _build(name, arguments):
    import torch

    from gpipe_bench.models.table import MODELS

    with torch.device("meta"):
        return MODELS[name].build(**arguments)


def test_the_efficiencies_that_made_the_rows_are_found(rows, cache):
    fit = calibrate_rows(rows, H100, cache=cache)
    assert fit.profile.efficiency.origin == "fitted"
    for share in SHARES:
        assert getattr(fit.profile.efficiency, share) == pytest.approx(TRUTH[share], rel=0.1)
        low, high = fit.spread[share]
        assert low <= getattr(fit.profile.efficiency, share) <= high
    assert len(fit.errors) == len(CELLS)
    assert max(map(abs, fit.errors.values())) < 0.02


def test_everything_else_of_the_profile_stays(rows, cache):
    fit = calibrate_rows(rows, H100, name="mine", cache=cache)
    changed = {"name", "efficiency", "sources"}
    assert fit.profile.model_dump(exclude=changed) == H100.model_dump(exclude=changed)
    assert fit.profile.name == "mine"
    assert "3 cells measured on cuda H100" in fit.profile.sources["efficiency"]


def test_one_row_is_enough_but_its_spread_is_wide(rows, cache):
    one, all_ = calibrate_rows(rows[:1], H100, cache=cache), calibrate_rows(rows, H100, cache=cache)
    assert abs(next(iter(one.errors.values()))) < 0.02
    for share in SHARES:
        width, least = (fit.spread[share][1] / fit.spread[share][0] for fit in (one, all_))
        assert width > 1.2 * least


@pytest.mark.parametrize("kept", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("errors", [(0, 0, 0), (0.03, -0.03, 0.03), (-0.03, 0.03, 0.03)], ids=str)
def test_the_spread_holds_the_efficiencies_that_made_the_rows(kept, errors, rows, cache):
    """Whatever the cells tell, and where they are wrong by what a cell may be."""
    used = [
        _changed(row, throughput_samples_per_s=row.throughput_samples_per_s * (1 + errors[cell]))
        for cell in kept
        for row in rows[2 * cell : 2 * cell + 2]
    ]
    fit = calibrate_rows(used, H100, cache=cache)
    for share, (low, high) in fit.spread.items():
        assert low < getattr(fit.profile.efficiency, share) < high + 0.0005
        assert low < TRUTH[share] < high


def test_a_cell_that_takes_the_host_longest_tells_nothing_of_shares(rows, cache):
    fit = calibrate_rows(_measured("amoebanet-d", {"L": 3, "D": 256, "size": 64}, 4, cache), H100, cache=cache)
    for share, (low, high) in fit.spread.items():
        assert getattr(fit.profile.efficiency, share) == pytest.approx(getattr(H100.efficiency, share), rel=0.01)
        assert low < TRUTH[share] < high


def test_cells_that_contradict_each_other_have_a_wider_spread(rows, cache):
    def widths(factor):
        almost_the_same = _changed(
            rows[0], batch_size=60, throughput_samples_per_s=factor * rows[0].throughput_samples_per_s
        )
        fit = calibrate_rows([rows[0], almost_the_same], H100, cache=cache)
        return [high / low for low, high in fit.spread.values()]

    assert all(after > before for before, after in zip(widths(1), widths(1.2), strict=True))


def test_the_median_of_the_repeats_counts(rows, cache):
    slow = [row for row in rows if row.repeat == 0]
    others = [Row.from_dict({**row.to_dict(), "throughput_samples_per_s": 1.0, "repeat": 2}) for row in slow]
    assert (
        calibrate_rows([*rows, *others], H100, cache=cache).profile == calibrate_rows(rows, H100, cache=cache).profile
    )


def _changed(row, **columns):
    return Row.from_dict({**row.to_dict(), **columns})


def test_rows_of_no_use_are_passed_over(rows, cache):
    useless = [
        _changed(rows[0], partitions=2),
        _changed(rows[0], device_count=2),
        _changed(rows[0], evidence="simulated"),
        _changed(rows[0], model="resnet101"),
        _changed(rows[0], status="oom", reason="full", throughput_samples_per_s=None),
    ]
    fit = calibrate_rows([*rows[:2], *useless], H100, cache=cache)
    assert (len(fit.errors), fit.ignored) == (1, len(useless))


def test_no_row_or_rows_of_two_devices(rows):
    with pytest.raises(ConfigError, match="got none among 0"):
        calibrate_rows([], H100)
    with pytest.raises(ConfigError, match="got rows of cuda A100, cuda H100"):
        calibrate_rows([rows[0], _changed(rows[2], device="cuda A100")], H100)


def test_rows_of_another_device_than_the_profiles(rows, cache):
    with pytest.raises(ConfigError, match="of profile p40, Tesla P40, got rows of cuda H100; choose the profile"):
        calibrate_rows(rows, load_profile("p40"), cache=cache)


def test_rows_that_are_faster_than_the_peaks(rows, cache):
    """Of a device that does nine times what the profile says it can."""
    fast = [_changed(row, throughput_samples_per_s=9 * row.throughput_samples_per_s) for row in rows]
    with pytest.raises(
        ConfigError, match=r"within the peaks of profile h100, got .* faster than at these peaks"
    ) as caught:
        calibrate_rows(fast, H100, cache=cache)
    assert len(caught.value.problems) == len(CELLS)


@pytest.mark.parametrize(("factor", "refused"), [(1.04, False), (1.08, True)])
def test_one_row_beyond_the_peaks_is_refused_among_others(factor, refused, rows, cache):
    largest = {"conv3x3_stride1": 4.0, "other_conv_matmul": 1.0, "memory_bound": 1.0, "matmul": 1.0}
    most = H100.model_copy(update={"efficiency": H100.efficiency.model_copy(update=largest), "launch_us": 0.0})
    name, arguments, batch_size = CELLS[0]
    peak = simulate(Model(name, arguments), balance=[len(_build(name, arguments))], batch_size=batch_size, chunks=2,
                    profile=most, steps=1, cache=cache).throughput_samples_per_s  # fmt: skip
    # The fit keeps the ratio of other convolutions to products, so that they reach less than their peak.
    beyond = [_changed(row, throughput_samples_per_s=factor * peak) for row in rows[:1]]
    if refused:
        with pytest.raises(ConfigError, match="within the peaks"):
            calibrate_rows([*beyond, *rows[2:]], H100, cache=cache)
    else:
        calibrate_rows([*beyond, *rows[2:]], H100, cache=cache)


def test_rows_at_the_peaks_give_a_profile_that_can_be_loaded(rows, cache):
    """The share of products is at its limit, whatever rounding does to the one that it is tied to."""
    efficiency = H100.efficiency.model_copy(update={"other_conv_matmul": 0.23, "matmul": 0.75})
    tied = H100.model_copy(update={"efficiency": efficiency})
    fast = [_changed(row, throughput_samples_per_s=1.25 * row.throughput_samples_per_s) for row in rows[4:]]
    made = calibrate_rows(fast, tied, cache=cache).profile
    assert parse_profile(made.model_dump()) == made
    assert (made.efficiency.other_conv_matmul, made.efficiency.matmul) == (0.307, 1)


def test_rows_that_no_device_is_as_slow_as(rows, cache):
    slow = [_changed(row, throughput_samples_per_s=1e-6 * row.throughput_samples_per_s) for row in rows]
    with pytest.raises(ConfigError, match=r"^efficiency\.\w+ must be at least 0\.001, got .* from the fit; .* slower"):
        calibrate_rows(slow, H100, cache=cache)


def test_the_command_writes_a_profile_that_simulate_takes(rows, cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gpipe_bench.simulator.workloads.sources.default_folder", lambda: cache)
    table, out = tmp_path / "rows.csv", tmp_path / "mine.yaml"
    table.write_text(csv_text(Row.columns(), [row.to_dict() for row in rows]))
    with pytest.raises(SystemExit) as caught:
        main(["calibrate", "--rows", str(table), "--profile", "h100", "--out", str(out)])
    assert not caught.value.code
    printed = capsys.readouterr().out
    assert "efficiencies from 3 cells; 0 rows were of no use" in printed
    assert "; 0.29 before)" in printed
    made = load_profile(out)
    assert made.name == "mine"
    assert made.efficiency.conv3x3_stride1 == pytest.approx(TRUTH["conv3x3_stride1"], rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--rows", "nowhere.csv", "--out", "a.yaml"), "nowhere.csv"),
        (("--rows", "empty.csv", "--out", "a.yaml"), "rows must hold"),
        (("--rows", "empty.csv", "--out", "a.yaml", "--profile", "p41"), "profile must be one of"),
    ],
    ids=["rows", "none", "profile"],
)
def test_bad_input_of_the_command(arguments, problem, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.csv").write_text(csv_text(Row.columns(), [Row().to_dict()]))
    with pytest.raises(SystemExit) as caught:
        main(["calibrate", *arguments])
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "a.yaml").exists()
