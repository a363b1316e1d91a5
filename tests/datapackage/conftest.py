"""A folder of results, as an experiment leaves them."""

from __future__ import annotations

import shutil

import pytest

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.suite.datapackage.descriptor import write_descriptor
from gpipe_bench.suite.evaluation.collect import write_tables
from tests.suite.cells_of import ok_result


@pytest.fixture
def table(tmp_path):
    """``ablation.csv`` and its companions: two variants, one of them twice."""
    path = tmp_path / "results" / "ablation.csv"
    write_tables(
        [ok_result("baseline", 0), ok_result("baseline", 1, 12.0), ok_result("dep-x-ptl", 0)], "ablation", path
    )
    return path


@pytest.fixture
def package(tmp_path):
    """A copy of the published results with a descriptor of its own."""
    folder = tmp_path / "package"
    shutil.copytree(REFERENCE_FOLDER / "published", folder / "published")
    write_descriptor(folder)
    return folder
