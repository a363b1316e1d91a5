"""All planted faults: those of numbers, and those of how a step is run."""

from __future__ import annotations

from gpipe_bench.judge import faults_of_numbers, faults_of_runs
from gpipe_bench.judge.planted import FAULTS

__all__ = ["FAULTS", "faults_of_numbers", "faults_of_runs"]
