"""A checkout for one test."""

from __future__ import annotations

import pytest

from tests.workflow.checkouts import checkout, snakemake_in


@pytest.fixture
def place(tmp_path):
    """A checkout in which nothing was run."""
    return checkout(tmp_path)


@pytest.fixture
def snakemake(place):
    """Snakemake in that checkout."""
    return snakemake_in(place)
