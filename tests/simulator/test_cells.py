"""Durations and peaks of cells are those of ``cells.csv``."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

from tests.project.tree import ROOT
from tests.simulator.cells import MODELS, RESULTS, name_of, results, rows

PINNED = re.search(r"^torch==(.*)$", (ROOT / "requirements" / "pins.in").read_text(), re.MULTILINE)
TRACED = pytest.mark.skipif(
    PINNED is None or version("torch").partition("+")[0] != PINNED[1], reason="another PyTorch gives other traces"
)
CELLS = [pytest.param(row, marks=TRACED if row["work"] in MODELS else (), id=name_of(row)) for row in rows()]


@pytest.mark.parametrize("row", CELLS)
def test_a_cell_is_as_its_row_says(row):
    expected = {name: row[name] for name in RESULTS}
    assert results(row) == expected, "if this is meant: python -m tests.simulator.cells"
