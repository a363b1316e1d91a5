"""The default configuration asks for the cells and jobs of the golden list, on every kind of machine."""

from __future__ import annotations

import os

import pytest

from tests.project.tree import ROOT
from tests.suite.default_plan import GOLDEN, golden_lines


@pytest.fixture(autouse=True)
def _two_cores_in_the_checkout(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.chdir(ROOT)


def test_cells_and_jobs_are_those_of_the_golden_list():
    """Where this is meant to change, ``python -m tests.suite.default_plan`` writes the list anew."""
    assert golden_lines() == GOLDEN.read_text().splitlines()
