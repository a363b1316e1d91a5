"""From times of small programs to the constants of a profile.

Each program is traced as a layer of a model is, so that constants mean what the law takes them for. All of them are
fitted together, by least squares of relative errors: some programs tell several constants. The search begins where work
takes far longer than bytes, so that every rate is felt. A constant that no program tells stays as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from gpipe_bench.kernels.accelerator import accelerator_kernels
from gpipe_bench.kernels.kernel import Kernel
from gpipe_bench.kernels.law import part_ns
from gpipe_bench.machine.constants import CONSTANTS, Constant, largest
from gpipe_bench.machine.profile import Profile
from gpipe_bench.simulator.tracing.recorder import Recorder

# A departure from what a profile assumes counts as little as this share of an error.
_PRIOR: Final = 0.01
_SLOW: Final = log(1000)
# A time determines a constant if it changes by at least a tenth of the constant's relative change.
_TOLD: Final = 0.1


@dataclass(frozen=True, slots=True)
class TimedProgram:
    """A program, and how long it takes.

    Attributes:
        name: what it is.
        kernels: what it runs, and how often.
        seconds: of each repeat.
        tf32: whether its convolutions in float32 may use TF32.
    """

    name: str
    kernels: Counter[Kernel]
    seconds: Sequence[float]
    tf32: bool = True

    def law_s(self, profile: Profile) -> float:
        """Seconds by the law."""
        device = profile if self.tf32 else profile.adapted(tf32=False)
        times = (
            count * sum(part_ns(part, kernel.dtype, device) for part in kernel.parts or ())
            for kernel, count in self.kernels.items()
        )
        return sum(times) / 1e9


def traced(prepare: Callable[[], Callable[[], object]]) -> Counter[Kernel]:
    """The kernels of a program; ``prepare`` makes it on the meta device."""
    recorder = Recorder()
    with accelerator_kernels():
        run = prepare()
        with recorder:
            run()
    return Counter(step for step in recorder.take() if isinstance(step, Kernel))


def fitted_constants(programs: Sequence[TimedProgram], names: Sequence[str], profile: Profile) -> dict[str, Constant]:
    """The constants that fit the median times best, each with its spread over the repeats.

    Args:
        programs: with the same number of repeats.
        names: constants that the programs tell.
        profile: the device; its constants are where those begin that are fitted, and the value of all others.
    """
    fit = _Fit(programs, names, profile)
    # Rates of work begin slow; beside slow memory no other rate would be felt.
    rates = {name for name in fit.before if CONSTANTS[name].unit in ("share", "G/s") and name != "memory"}
    slow = [log(value) - _SLOW * (name in rates) for name, value in fit.before.items()]
    found, told = fit.solve([median(program.seconds) for program in programs], slow)
    repeats = zip(*(program.seconds for program in programs), strict=True)
    others, others_told = zip(*(fit.solve(list(seconds), found) for seconds in repeats), strict=True)
    constants = dict(profile.kernels or {})
    # What memory hides in one repeat is not known from the others.
    always = (all(flags) for flags in zip(told, *others_told, strict=True))
    for name, value, is_told, *each in zip(names, found, always, *others, strict=True):
        if is_told:
            spread = (exp(max(each)) - exp(min(each))) / 2 / exp(value)
            middle = float(f"{exp(value):.4g}")
            constants[name] = Constant(value=middle, origin="measured", spread=round(spread, 4))
    return constants


class _Fit:
    def __init__(self, programs: Sequence[TimedProgram], names: Sequence[str], profile: Profile) -> None:
        self._programs, self._profile = programs, profile
        self.before = {name: profile.constants[name] for name in names}

    def solve(self, seconds: Sequence[float], start: Sequence[float]) -> tuple[list[float], list[bool]]:
        """Logarithms of the constants, and whether each is told."""
        centre = [log(value) for value in self.before.values()]

        def residuals(logs: Sequence[float]) -> list[float]:
            profile = with_constants(self._profile, dict(zip(self.before, map(exp, logs), strict=True)))
            errors = [log(row.law_s(profile) / time) for row, time in zip(self._programs, seconds, strict=True)]
            return [*errors, *(_PRIOR * (value - first) for value, first in zip(logs, centre, strict=True))]

        most = np.log([largest(name) for name in self.before]) + 1e-9
        found = least_squares(residuals, np.minimum(start, np.subtract(most, 1e-6)), bounds=(-np.inf, most))
        effects = np.abs(found.jac[: len(self._programs)]).max(axis=0)
        return found.x.tolist(), (effects > _TOLD).tolist()


def with_constants(profile: Profile, values: Mapping[str, float]) -> Profile:
    """The profile with other values of some constants."""
    changed = {name: Constant(value=min(value, largest(name)), origin="assumed") for name, value in values.items()}
    return Profile(**{**profile.settings, "kernels": {**(profile.kernels or {}), **changed}})
