"""Bubbles and throughputs that Zero Bubble prints, beside the arithmetic of schedules."""

from __future__ import annotations

import pytest

from gpipe_bench.cli import main
from gpipe_bench.schedules.printed import printed_steps


@pytest.fixture(scope="module")
def steps():
    return list(printed_steps())


def test_every_setting_has_each_schedule(steps):
    assert len(steps) == len({(step.setting, step.schedule) for step in steps}) == 48


def test_bubbles_are_the_printed_ones(steps):
    for step in steps:
        if step.schedule == "interleaved":
            assert 0.0007 <= step.bubble - step.printed_bubble <= 0.0036
        else:
            assert f"{step.bubble:.4f}" == f"{step.printed_bubble:.4f}"


@pytest.mark.parametrize(("schedule", "percent"), [("1f1b", 6.3), ("zb_h1", 7.7), ("interleaved", 13.0)])
def test_throughputs_are_above_the_measured_ones(steps, schedule, percent):
    errors = [step.error_fraction for step in steps if step.schedule == schedule]
    assert min(errors) > 0
    assert 100 * sum(errors) / len(errors) == pytest.approx(percent, abs=0.05)


def test_the_command_prints_errors_of_ratios(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gpipe_bench.suite.published.predictions.predictions", lambda *_: iter(()))
    with pytest.raises(SystemExit):
        main(["predictions", "--table", "zero-bubble", "--out", str(tmp_path / "predictions.csv")])
    assert "bubbles equal to four digits: 36 of 48" in (printed := capsys.readouterr().out)
    assert "zb_h1 over 1f1b: mean absolute error 1.35 % of 12 throughputs" in printed
