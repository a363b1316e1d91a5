"""The constants of the P40: fitted by the command that its profile names, to rows without pipelining."""

from __future__ import annotations

from collections import Counter

import pytest

from gpipe_bench.errors import ConfigError
from gpipe_bench.kernels.kernel import Kernel, Whole
from gpipe_bench.machine.profile import load_profile, parse_profile
from gpipe_bench.simulator.published.settings import published_settings, published_value
from studies.simulator import fit
from studies.simulator.fit import FITTED, Observation, calibrate, fit_rows, fitted_profile

P40 = load_profile("p40")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    return calibrate(fit_rows(tmp_path_factory.mktemp("traces")), P40)


def test_the_profile_holds_the_fit(calibration):
    assert calibration.profile.efficiency == P40.efficiency


def test_errors_of_the_rows(calibration):
    """Simulated over published, minus 1, in percent, as they are; AmoebaNet-D tells wide filters by itself."""
    expected = {
        "unet-speed baseline": 0.29,
        "unet-speed pipeline-1": -0.29,
        "resnet101-speed baseline": 0.33,
        "resnet101-speed pipeline-1": -0.40,
        "amoebanet-d-speed n2m1": -0.02,
    }
    assert {name: 100 * error for name, error in calibration.errors.items()} == pytest.approx(expected, abs=0.02)


def test_the_spread_holds_the_fit(calibration):
    """Without AmoebaNet-D nothing tells wide filters from the rest."""
    spread = calibration.spread
    assert set(spread) == set(FITTED)
    for name, (low, high) in spread.items():
        assert low <= getattr(calibration.profile.efficiency, name) <= high
    assert spread["conv3x3_stride1"][1] / spread["conv3x3_stride1"][0] < 1.03
    assert spread["spatial_conv"][1] / spread["spatial_conv"][0] > 10


KERNELS = [
    Kernel(name, "float32", 1, Whole(kind, flop=10**12))
    for name, kind in (("a", "conv3x3_stride1"), ("b", "spatial_conv"), ("c", "matmul"))
]
SHARES = {"conv3x3_stride1": 1.5, "spatial_conv": 0.2, "other_conv_matmul": 0.3}


def made_by(shares, faster=1.0):
    """Rows that a device with these shares would have measured."""
    truth = P40.model_copy(update={"efficiency": P40.efficiency.model_copy(update=shares)})
    rows = []
    for name, counts in (("x", (3, 1, 1)), ("y", (1, 3, 1)), ("z", (1, 1, 3)), ("all", (1, 1, 1))):
        work = Counter(dict(zip(KERNELS, counts, strict=True)))
        rows.append(Observation(name, work, (), 100, faster * Observation(name, work, (), 100, 1.0).simulated(truth)))
    return rows


def test_a_fit_finds_what_made_its_rows():
    rows = made_by(SHARES)
    fitted = calibrate(rows, P40).profile.efficiency
    assert {name: getattr(fitted, name) for name in FITTED} == SHARES


@pytest.mark.parametrize(
    ("share", "faster", "rule", "names"),
    [
        (0.9, 4, "must be at most 1, got 1.2 from the fit; the rows are faster", ["other_conv_matmul"]),
        (1.5, 10, "must be at most 4, got 15 from the fit", ["conv3x3_stride1", "other_conv_matmul"]),
        (1.5, 0.001, "must be at least 0.001, got 0.0002 from the fit; the rows are slower",
         ["spatial_conv", "other_conv_matmul"]),
    ],
)  # fmt: skip
def test_a_fit_ends_where_a_profile_would_refuse_its_shares(share, faster, rule, names):
    with pytest.raises(ConfigError) as caught:
        calibrate(made_by(SHARES | {"conv3x3_stride1": share}, faster), P40)
    assert rule in str(caught.value)
    problems = caught.value.problems
    assert [text.split()[0] for text in problems] == [f"efficiency.{name}" for name in names]
    assert all(text.endswith("of profile p40 can be: correct its peaks or check the rows") for text in problems)


def test_fitted_shares_are_those_of_a_profile_that_can_be_loaded():
    made = fitted_profile(P40, {"other_conv_matmul": 1.0004, "matmul": None})
    assert made.efficiency.other_conv_matmul == 1
    assert parse_profile(made.model_dump()) == made


def test_the_command_says_what_is_wrong_with_its_rows(monkeypatch, capsys):
    monkeypatch.setattr(fit, "fit_rows", lambda: made_by(SHARES | {"conv3x3_stride1": 0.9}, 4))
    with pytest.raises(SystemExit) as caught:
        fit.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: efficiency.other_conv_matmul must be at most 1, got 1.2")


def test_published_rows_and_their_settings():
    rows = published_settings()
    assert len(rows) == 133
    ablation = {
        row.experiment: published_value(row, "throughput_samples_per_s") for row in rows if row.table == "ablation"
    }
    assert ablation == {"baseline": 30.662, "dep-x-x": 41.306, "dep-str-x": 55.191, "dep-str-ptl": 58.477}
    assert {row.layers for row in rows if row.table == "ablation"} == {(34, 76, 70, 61)}
