"""A folder of results, as an experiment leaves them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.suite.datapackage.descriptor import write_descriptor
from gpipe_bench.suite.evaluation.collect import write_tables
from tests.suite.cells_of import ok_result


def with_own_steps(result):
    """The result with three steps, whose median is the step time of its row."""
    steps = [
        {"step": k, "step_time_ms": part * result.row.step_time_ms, "throughput_samples_per_s": 1.0}
        for k, part in enumerate((0.9, 1.0, 1.5))
    ]
    return replace(result, steps=steps)


@pytest.fixture
def table(tmp_path):
    """``ablation.csv`` and its companions: two variants, one of them twice."""
    path = tmp_path / "results" / "ablation.csv"
    results = [ok_result("baseline", 0), ok_result("baseline", 1, 12.0), ok_result("dep-x-ptl", 0)]
    write_tables([with_own_steps(result) for result in results], "ablation", path)
    return path


@pytest.fixture
def package(tmp_path):
    """A copy of the published results with a descriptor of its own."""
    folder = tmp_path / "package"
    shutil.copytree(REFERENCE_FOLDER / "published", folder / "published")
    write_descriptor(folder)
    return folder
