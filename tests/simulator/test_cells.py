"""Durations and peaks of cells are those of ``cells.csv``."""

from __future__ import annotations

import pytest

from tests.simulator.cells import RESULTS, name_of, results, rows


@pytest.mark.parametrize("row", rows(), ids=name_of)
def test_a_cell_is_as_its_row_says(row):
    expected = {name: row[name] for name in RESULTS}
    assert results(row) == expected, "if this is meant: python -m tests.simulator.cells"
