"""Fit the host of the profile ``h200``, its microseconds for an operation and for a parameter, to training steps.

    python -m studies.kernels.host

    step = max(kernels, launch_us x operations) + parameter_us x parameters

The squares of the relative errors of 25 measured steps are the least. The kernels are those of the profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy.optimize import brute, fmin

from gpipe_bench.machine.profile import load_profile
from gpipe_bench.models.table import parse_arguments
from gpipe_bench.simulator import Model
from gpipe_bench.simulator.workloads.build import build_workload
from gpipe_bench.suite.published.measured import TABLES, MeasuredStep, measured_steps

_RANGES: Final = ((10, 50), (1, 50))


def work_of(step: MeasuredStep) -> tuple[float, int, int]:
    """Milliseconds of the kernels of a step of one device, operations of its host, and parameters."""
    cell, profile = step.cell, load_profile("h200")
    work = build_workload(
        Model(cell.model, parse_arguments(cell.model, cell.model_args)), balance=cell.balance,
        batch_size=cell.batch_size, precision=cell.precision, masters=cell.masters, profile=profile,
    )  # fmt: skip
    task = work.task(0, 0)
    passes = task.forward, task.backward, work.loss, *work.optimizer
    kernels_ns = sum(each.duration_ns for each in passes) - task.backward.adding_ns
    return kernels_ns / 1e6, sum(each.launches for each in passes), task.backward.adding_launches


def fitted(steps: Sequence[MeasuredStep]) -> tuple[float, float]:
    """The microseconds of an operation, and of a parameter."""
    measured = np.array([step.measured_ms for step in steps])
    kernels, operations, parameters = np.array([work_of(step) for step in steps]).T

    def squares(host: Sequence[float]) -> float:
        launch_us, parameter_us = host
        step_ms = np.maximum(kernels, launch_us * operations / 1000) + parameter_us * parameters / 1000
        return float(((step_ms / measured - 1) ** 2).sum())

    launch_us, parameter_us = brute(squares, _RANGES, Ns=81, finish=fmin, disp=False)
    return float(launch_us), float(parameter_us)


if __name__ == "__main__":
    print("launch_us {:.1f}, parameter_us {:.1f}".format(*fitted([*measured_steps(TABLES["h200-steps"])])))
