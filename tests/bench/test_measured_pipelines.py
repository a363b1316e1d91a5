"""Pipelines that were measured on one H100, and how far the simulator is from them."""

from __future__ import annotations

import pytest

from gpipe_bench.bench.published import measured
from gpipe_bench.bench.published.measured import MeasuredPipeline, measured_pipelines
from gpipe_bench.cli import main
from gpipe_bench.components import PUBLISHED


def test_each_published_variant_is_predicted_roughly_and_in_the_measured_order(tmp_path):
    found = {one.variant: one for one in measured_pipelines(tmp_path)}
    assert set(found) == set(PUBLISHED)
    assert all(-0.01 < one.error_fraction < 0.13 for one in found.values())
    for kind in ("measured_ms", "simulated_ms"):
        times = [getattr(found[variant], kind) for variant in PUBLISHED]
        assert times == sorted(times, reverse=True)


def test_the_command_prints_them(monkeypatch, capsys):
    steps = [MeasuredPipeline("baseline", 100.0, 90.0), MeasuredPipeline("dep-x-x", 100.0, 120.0)]
    monkeypatch.setattr(measured, "measured_pipelines", lambda _: iter(steps))
    with pytest.raises(SystemExit) as ended:
        main(["predictions", "--table", "h100-steps"])
    assert not ended.value.code
    assert "mean absolute error 15.0 % of 2 steps, largest 20.0 %" in capsys.readouterr().out
