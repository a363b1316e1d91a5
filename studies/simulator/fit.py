"""Fits the efficiencies of a device to published throughputs that no pipeline takes part in.

    python -m studies.simulator.fit          prints the constants of profiles/p40.yaml, and every row's error

The rows are those of one device, and AmoebaNet-D n2m1: one micro-batch on two devices, one after the other. Fitted are
the shares of the peak of the three classes of computing kernels. These rows hardly tell the share of the bandwidth.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from scipy.optimize import least_squares

from gpipe_bench.errors import ConfigError, GpipeBenchError
from gpipe_bench.kernels.cost import duration_ns
from gpipe_bench.kernels.kernel import Kernel
from gpipe_bench.machine.profile import Efficiency, HardwareMachine, Profile, load_profile
from gpipe_bench.models.table import parse_arguments
from gpipe_bench.simulator.published.settings import PublishedSetting, published_settings, published_value
from gpipe_bench.simulator.workloads.optimizers import optimizer_kernels, trace_optimizer
from gpipe_bench.simulator.workloads.sources import ModelSource, model_of_suite
from gpipe_bench.step.request import microbatch_sizes

FITTED: Final = ("conv3x3_stride1", "spatial_conv", "other_conv_matmul")
"""The fitted efficiencies."""

# Where a fit starts, so that a fit of its own result gives the same numbers.
_START: Final = (0.8, 0.4, 0.4)
_DIGITS: Final = 3
# The profile that the rows tell.
_FITTED: Final = "p40"
# Farther from 1 than any share; a step of the fit that goes beyond would overflow.
_FARTHEST: Final = 50.0


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured throughput, and what one epoch of it runs on the devices.

    Attributes:
        name: of the row.
        kernels: kernel -> how often it runs, all of them one after the other.
        copies: (bytes, times) between neighbouring devices, which nothing hides.
        samples: per epoch.
        samples_per_s: measured.
    """

    name: str
    kernels: Counter[Kernel]
    copies: tuple[tuple[int, int], ...]
    samples: int
    samples_per_s: float

    def simulated(self, profile: Profile) -> float:
        """Samples per second on devices of that profile, where the host may be what takes longest."""
        machine = HardwareMachine(profile)
        host = machine.launch_ns * sum(times * kernel.launches for kernel, times in self.kernels.items())
        copies = sum(times * machine.copy_ns(0, 1, size) for size, times in self.copies)
        return self.samples / (max(self.device_ns(profile), host) + copies) * 1e9

    def device_ns(self, profile: Profile) -> int:
        """Device time of the kernels of one epoch."""
        return sum(times * duration_ns(kernel, profile) for kernel, times in self.kernels.items())


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted efficiencies.

    Attributes:
        profile: the profile with the fitted efficiencies.
        errors: row -> simulated over measured, minus 1.
        spread: efficiency -> (smallest, largest) when each row in turn is left out.
    """

    profile: Profile
    errors: dict[str, float]
    spread: dict[str, tuple[float, float]]


def calibrate(observations: Sequence[Observation], profile: Profile) -> Calibration:
    """Fit the shares of the peak to observations, by least squares of relative errors.

    Args:
        observations: rows without pipelining; three or more, which differ in their kinds of convolutions.
        profile: the device; its share of the memory bandwidth is kept.

    Raises:
        ConfigError: profiles refuse a fitted share, such as one above 1.
    """
    fitted = fitted_profile(profile, dict(zip(FITTED, _shares(observations, profile), strict=True)))
    # What is fitted to fewer rows is no profile, so it may be any number.
    others = [_shares([row for row in observations if row is not left_out], profile) for left_out in observations]
    spread = [(round(min(found), 3), round(max(found), 3)) for found in zip(*others, strict=True)]
    return Calibration(fitted, errors_of(observations, fitted), dict(zip(FITTED, spread, strict=True)))


def errors_of(observations: Sequence[Observation], profile: Profile) -> dict[str, float]:
    """Row -> simulated over measured throughput, minus 1."""
    return {row.name: row.simulated(profile) / row.samples_per_s - 1 for row in observations}


def _shares(observations: Sequence[Observation], profile: Profile) -> list[float]:
    """The shares that fit best, in the order of :data:`FITTED`."""

    def residuals(logs: Sequence[float]) -> list[float]:
        candidate = with_shares(profile, dict(zip(FITTED, map(_share, logs), strict=True)))
        return [log(row.simulated(candidate) / row.samples_per_s) for row in observations]

    # Durations are whole nanoseconds, so a derivative needs a step that is not too small.
    found = least_squares(residuals, [log(share) for share in _START], diff_step=1e-3)
    return list(map(_share, found.x))


def _share(logarithm: float) -> float:
    return exp(max(-_FARTHEST, min(_FARTHEST, logarithm)))


def with_shares(profile: Profile, shares: Mapping[str, float | None]) -> Profile:
    """The profile with other efficiencies, whatever they are."""
    return profile.model_copy(update={"efficiency": profile.efficiency.model_copy(update=shares)})


def fitted_profile(profile: Profile, shares: Mapping[str, float | None]) -> Profile:
    """The profile with fitted shares, of three digits after the point; a share is None if the profile does not have it.

    Raises:
        ConfigError: profiles refuse a share, all of which it lists.
    """
    rounded = {name: None if share is None else round(share, _DIGITS) for name, share in shares.items()}
    values: dict[str, Any] = {**profile.efficiency.model_dump(), **rounded, "origin": "fitted"}
    try:
        efficiency = Efficiency.model_validate(values)
    except ValidationError as error:
        raise ConfigError([_problem(item, shares, profile.name) for item in error.errors()]) from None
    return profile.model_copy(update={"efficiency": efficiency})


def _problem(error: Any, shares: Mapping[str, float | None], name: str) -> str:
    (share,) = error["loc"]
    if error["type"] == "less_than_equal":
        rule, rows = f"at most {error['ctx']['le']:g}", "faster"
    else:
        rule, rows = f"at least {10**-_DIGITS:g}", "slower"
    return (
        f"efficiency.{share} must be {rule}, got {shares[share]:.3g} from the fit; the rows are {rows} than a device "
        f"of profile {name} can be: correct its peaks or check the rows"
    )


def fit_rows(cache: Path | None = None) -> list[Observation]:
    """The published rows that shares of the P40 are fitted to; ``cache``: folder of stored traces."""
    fitted = [row for row in published_settings() if (row.role, row.profile) == ("fitted", _FITTED)]
    rows = sorted(fitted, key=lambda row: row.partitions)
    return [observe(row, published_value(row, "throughput_samples_per_s"), cache) for row in rows]


def observe(row: PublishedSetting, samples_per_s: float, cache: Path | None = None) -> Observation:
    """What one epoch of a row runs, of one device or of several with one micro-batch, and its throughput."""
    source = model_of_suite(row.model, parse_arguments(row.model, row.model_args), cache)
    kernels: Counter[Kernel] = Counter()
    copies: Counter[int] = Counter()
    steps = [(row.batch_size, row.full_steps), *([(row.rest_batch_size, 1)] if row.rest_batch_size else [])]
    for batch_size, times in steps:
        kernels.update({kernel: times * count for kernel, count in _step(row, source, batch_size, cache).items()})
        start = 0
        for layers in row.layers[:-1]:
            start += layers
            for port in source.layers(batch_size)[start - 1].outputs:
                # Forward, and the gradient back.
                copies[port.bytes] += 2 * times
    samples = sum(batch_size * times for batch_size, times in steps)
    return Observation(f"{row.table} {row.experiment}", kernels, tuple(copies.items()), samples, samples_per_s)


def _step(row: PublishedSetting, source: ModelSource, batch_size: int, cache: Path | None) -> Counter[Kernel]:
    kernels: Counter[Kernel] = Counter()
    sizes = microbatch_sizes(batch_size, row.chunks)
    for i, size in enumerate(sizes):
        layers = source.layers(size)
        again = row.checkpoint == "always" or (row.checkpoint == "except_last" and i < len(sizes) - 1)
        for layer in layers:
            kernels.update(layer.kernels("forward"))
            kernels.update(layer.kernels("backward"))
        # With one micro-batch, all but the last partition recompute while they wait for their gradient.
        for layer in layers[-row.layers[-1] :] if again else ():
            kernels.update(layer.kernels("forward"))
    loss = source.loss(batch_size)
    if loss is not None:
        kernels.update((*loss.kernels("forward"), *loss.kernels("backward")))
    dtypes = {parameter.dtype for facts in source.facts for parameter in facts.parameters}
    kernels.update(optimizer_kernels(trace_optimizer(row.optimizer, dtypes, cache, published=True), source.facts))
    return kernels


def main() -> None:
    """Print the fit of the P40; ends with status 2 where it gives shares that profiles refuse."""
    try:
        result = calibrate(fit_rows(), load_profile(_FITTED))
    except GpipeBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    lines = [f"efficiency: {result.profile.efficiency.model_dump(exclude_none=True)}"]
    lines += [f"{name}: {low} .. {high} when a row is left out" for name, (low, high) in result.spread.items()]
    lines += [f"{name}: simulated {100 * error:+.2f} %" for name, error in result.errors.items()]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
