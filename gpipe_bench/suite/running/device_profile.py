"""A hardware profile of the device at hand: the constants of the simulator's law, measured.

Cases run on the device, which gives times, and on ``meta``, which gives kernels; the constants of kinds of kernels
follow from both. Steps of tiny networks give the host's time for an operation, threads that launch at once the effect
of the interpreter lock, copies the links. Peaks and bandwidth come from a data sheet if the package knows the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any, Final

import torch
import yaml

from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.constants import Constant
from gpipe_bench.machine.profile import Profile, known_profile, load_profile
from gpipe_bench.measure.cases import CASES, Bench, Case, peak_cases
from gpipe_bench.measure.devices import distinct_devices
from gpipe_bench.measure.environment import device_name, environment_facts
from gpipe_bench.measure.host_rates import TINY, loss, step_seconds, thread_slowdowns, update_seconds
from gpipe_bench.measure.queued import device_seconds
from gpipe_bench.simulator.api import step_launches
from gpipe_bench.simulator.constants_fit import TimedProgram, fitted_constants, traced

REPEATS: Final = 5
_META: Final = torch.device("meta")
_CPU_SHRINK: Final = 64
_GIB: Final = 2**30
_US_PER_S: Final = 1e6
_UNSTEADY: Final = 0.3
_SAME_MEMORY: Final = 0.05
# What a constant is taken for until it is measured, or where no case tells it.
_ASSUMED: Final = "h100"
_AMPERE: Final = (8, 0)  # the first compute capability with TF32 and with bfloat16 that is fast
_HOPPER: Final = (9, 0)  # from here on PyTorch gives cuBLAS a larger workspace
_STREAMS: Final = [case.name for case in CASES if "memory" in case.constants]
_COPIED: Final = (2**20, 2**26)  # bytes; the first shows the latency of a copy, the second the bandwidth of the link
_SPEEDS: Final = ("peak_tflops", "matrix_tflops", "bandwidth_gb_per_s")

Way = tuple[torch.device, torch.device]


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """A profile, and what is to be said about it.

    Attributes:
        profile: ready for the simulator.
        errors: of the law, case by case: its time over the measured one, minus 1.
        failures: what could not be measured here, with the reason.
    """

    profile: Profile
    errors: Mapping[str, float]
    failures: Mapping[str, str]

    @property
    def unsteady(self) -> list[str]:
        """Constants whose repeats are far apart, as on a machine that does something else."""
        return [name for name, constant in (self.profile.kernels or {}).items() if (constant.spread or 0) > _UNSTEADY]

    @property
    def text(self) -> str:
        """The profile as a YAML file."""
        data = self.profile.model_dump(mode="json", exclude_none=True)
        text: str = yaml.safe_dump(data, sort_keys=False, width=160, default_flow_style=None)
        return text


def measure_profile(device: str, name: str, *, shrink: int = 0, cases: Sequence[Case] = CASES) -> MeasuredProfile:
    """Measure a device, in about half a minute.

    Peaks and bandwidth are those of the data sheet where the package has a profile of such a device, with as much
    memory and as many multiprocessors. Else they are those of large products and of a large tensor, so that shares are
    shares of these.

    Args:
        device: ``cuda``, or ``cpu`` to rehearse.
        name: of the profile.
        shrink: extents of the cases are divided by so much; 0: by 1, and on the CPU by 64.
        cases: what to run.

    Raises:
        ConfigError: neither a data sheet nor a measurement says how fast the device is.
    """
    (target,) = distinct_devices([device])
    bench = Bench(target, shrink or (_CPU_SHRINK if target.type == "cpu" else 1), _half(target))
    failures: dict[str, str] = {}
    timed = dict(_timed(cases, bench, failures))
    profile, told = _hardware(bench, list(timed.values()), name, failures), set[str]()
    # What a case tells alone does not yield to cases that tell several constants.
    for alone in (True, False):
        chosen = {case: program for case, program in timed.items() if (len(case.constants) == 1) == alone}
        names = {constant for case in chosen for constant in case.constants} - told
        told |= names
        if names:
            profile = _profile(profile.settings, fitted_constants([*chosen.values()], sorted(names), profile))
    profile = _profile(profile.settings, {**(profile.kernels or {}), **_host(target, failures)})
    errors = {row.name: row.law_s(profile) / median(row.seconds) - 1 for row in timed.values()}
    return MeasuredProfile(profile, errors, failures)


def _half(device: torch.device) -> torch.dtype:
    """The type of two bytes in which the device is measured."""
    old = device.type != "cpu" and torch.cuda.get_device_capability(device) < _AMPERE
    return torch.float16 if old else torch.bfloat16


def _timed(cases: Sequence[Case], bench: Bench, failures: dict[str, str]) -> Iterator[tuple[Case, TimedProgram]]:
    for case in cases:
        kernels = traced(partial(case.prepare, replace(bench, device=_META)))
        with _noted(failures, case.name):
            with _convolutions(tf32=case.tf32):
                seconds = device_seconds(case.prepare(bench), bench.device, REPEATS)
            yield case, TimedProgram(case.name, kernels, seconds, case.tf32)
        if bench.device.type != "cpu":
            torch.accelerator.empty_cache()


@contextmanager
def _noted(failures: dict[str, str], name: str) -> Iterator[None]:
    """Go on where something cannot be measured: it is too large for the device, or of a type that it does not have."""
    try:
        yield
    except RuntimeError as error:
        failures[name] = next(iter(str(error).splitlines()), type(error).__name__)


@contextmanager
def _convolutions(*, tf32: bool) -> Iterator[None]:
    """Let those in float32 use TF32, or not."""
    # It exists from PyTorch 2.9 on, but its annotations do not know it.
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before, convolutions.fp32_precision = convolutions.fp32_precision, "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        convolutions.fp32_precision = before


def _host(device: torch.device, failures: dict[str, str]) -> dict[str, Constant]:
    """Host time of an operation and of a parameter, and what threads that launch at once make of the former."""
    found = {}
    with _noted(failures, "launch_us"):
        updates, each = update_seconds(device, REPEATS), []
        for name, (make, shape) in TINY.items():
            with _META:
                net = make()
                launches = step_launches(net, torch.empty(shape), loss)
            updating = len([*net.parameters()]) * median(updates)
            steps = step_seconds(name, device, REPEATS)
            each.append([_US_PER_S * (seconds - updating) / launches for seconds in steps])
        found["launch_us"] = _constant([fmean(both) for both in zip(*each, strict=True)])
        found["parameter_us"] = _constant([_US_PER_S * seconds for seconds in updates])
    with _noted(failures, "lock"):
        found["lock"] = _constant(thread_slowdowns(device, REPEATS))
    return found


def _constant(samples: Sequence[float]) -> Constant:
    middle = median(samples)
    spread = (max(samples) - min(samples)) / 2 / middle
    return Constant(value=float(f"{middle:.4g}"), origin="measured", spread=round(spread, 4))


def _hardware(bench: Bench, programs: Sequence[TimedProgram], name: str, failures: dict[str, str]) -> Profile:
    """All that is no constant of a kind of kernels; these are assumed ones."""
    device, facts, memory = bench.device, environment_facts([bench.device]), _memory(bench.device)
    model = device_name(device)
    cuda = device.type != "cpu"
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else None
    capability = torch.cuda.get_device_capability(device) if cuda else ()
    known = _with_data_sheet(model, memory["memory_gib"], multiprocessors)
    assumed = known if known is not None and known.kernels else load_profile(_ASSUMED)
    constants = {key: Constant(value=value, origin="assumed") for key, value in assumed.constants.items()}
    if multiprocessors is not None:
        constants["multiprocessors"] = Constant(value=multiprocessors, origin="data sheet")
    links, about = _links(device, assumed, failures)
    between = "within" if "within" in links else "host"
    here = f"measured on {model}, PyTorch {facts['torch']}, CUDA {facts['cuda'] or 'none'}, {facts['started_utc']}"
    sheet = f"data sheet, as profile {known.name} has it" if known else f"the largest that was reached; {here}"
    return _profile(
        {
            **_speeds(known, bench, programs, failures),
            **memory,
            "name": name,
            "device": model,
            "winograd": False,
            # PyTorch's default.
            "cublas_workspace_mib": 32 if capability >= _HOPPER else 8.125 if capability else 0,
            "queue_depth": 1024,
            "links": links,
            "topology": {
                "group_size": 1 if device.type == "cpu" else torch.accelerator.device_count(),
                "within": between,
                "across": between,
                "host": "host",
            },
            "sources": {
                **dict.fromkeys(_SPEEDS, sheet),
                "kernels": here,
                "links": "; ".join((here, *about)),
                "topology": "assumed: all devices of this machine are neighbours",
                "memory_gib": "the driver" if device.type != "cpu" else "the system",
                "efficiency": "from the constants of kinds of kernels, for kernels that have none",
            },
        },
        constants,
    )


def _profile(settings: Mapping[str, Any], constants: Mapping[str, Constant]) -> Profile:
    """The profile, where kernels without constants follow those that have some."""
    values = {name: constant.value for name, constant in constants.items()}
    sources = {
        "conv3x3_stride1": "convolution_float32",
        "other_conv_matmul": "convolution_float32",
        "matmul": "product_float32",
        "memory_bound": "memory",
    }
    measured = all(constants[name].origin == "measured" for name in sources.values())
    shares = {name: values[constant] for name, constant in sources.items()}
    efficiency = {**shares, "origin": "measured" if measured else "assumed"}
    floors = {"kernel_floor_us": values["start_us"], "launch_us": values["launch_us"]}
    return Profile(**{**settings, **floors, "efficiency": efficiency, "kernels": dict(constants)})


def _with_data_sheet(model: str, memory_gib: float, multiprocessors: int | None) -> Profile | None:
    """The profile of the package for this device; its other forms, and its slices, have the name but other rates."""
    known = known_profile(model)
    if known is None or abs(memory_gib / known.memory_gib - 1) > _SAME_MEMORY:
        return None
    return known if known.constants.get("multiprocessors", multiprocessors) == multiprocessors else None


def _links(
    device: torch.device, assumed: Profile, failures: dict[str, str]
) -> tuple[dict[str, Mapping[str, float]], list[str]]:
    """The links of the device, and what is assumed about them."""
    links: dict[str, Mapping[str, float]] = {}
    about = []
    for name, link in ways(device).items():
        with _noted(failures, f"link {name}"):
            rate, latency = link_rate(link, device)
            links[name] = {"gb_per_s": rate, "latency_us": latency}
        if name not in links:
            other = getattr(assumed.topology, name)
            links[name] = assumed.links[other].model_dump(include={"gb_per_s", "latency_us"})
            about.append(f"{name}: assumed, {other} of profile {assumed.name}")
    if "within" not in links:
        about.append("between devices as to the host: assumed")
    return links, about


def _speeds(
    known: Profile | None, bench: Bench, programs: Sequence[TimedProgram], failures: dict[str, str]
) -> dict[str, Any]:
    if known is not None:
        return {key: getattr(known, key) for key in _SPEEDS}
    peaks: dict[str, float] = {}
    for dtype, (flop, prepare) in peak_cases(bench).items():
        with _noted(failures, f"peak of {dtype}"):
            peaks[dtype] = flop / min(device_seconds(prepare(bench), bench.device, REPEATS)) / 1e12
    streams = [row for row in programs if row.name in _STREAMS]
    if not streams or "float32" not in peaks:
        said = (f"{name}: {failures[name]}" for name in (*_STREAMS, "peak of float32") if name in failures)
        problem = f"a device without data sheet must run {_STREAMS[0]!r} and a product in float32, got "
        raise ConfigError([f"{problem}{'; '.join(said) or 'other cases'}; free its memory, or take another device"])
    rates = [sum(part.bytes for one in row.kernels for part in one.parts or ()) / min(row.seconds) for row in streams]
    ordinary = {dtype: peaks.pop(dtype) for dtype in ("float32", "float64") if dtype in peaks}
    return {"peak_tflops": ordinary, "matrix_tflops": peaks, "bandwidth_gb_per_s": max(rates) / 1e9}


def _memory(device: torch.device) -> dict[str, float]:
    """What the driver reports, and what is taken before the first tensor."""
    if device.type == "cpu":
        return {"memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB, "context_gib": 0}
    free, total = torch.cuda.mem_get_info(device)
    taken = max(0, total - free - torch.cuda.memory_reserved(device))
    return {"memory_gib": round(total / _GIB, 3), "context_gib": round(taken / _GIB, 3)}


def ways(device: torch.device) -> dict[str, list[Way]]:
    """From where to where each link copies: ``host``, and ``within`` if there is a neighbour."""
    host = torch.device("cpu")
    found = {"host": [(host, device), (device, host)]}
    count: int = 0 if device.type == "cpu" else torch.get_device_module(device).device_count()
    if others := [index for index in range(count) if index != device.index]:
        found["within"] = [(device, torch.device(device.type, others[0]))]
    return found


def link_rate(link: Sequence[Way], device: torch.device) -> tuple[float, float]:
    """10^9 bytes per second and microseconds of an empty transfer, by the slower of the ways of a link."""
    small, large = (
        max(median(device_seconds(_copy(*way, nbytes), device, REPEATS)) for way in link) for nbytes in _COPIED
    )
    # No latency is half of the time of a large copy: on a CPU the small one may have been held up.
    rate = (_COPIED[1] - _COPIED[0]) / max(large - small, large / 2)
    return rate / 1e9, max(0.0, small - _COPIED[0] / rate) * _US_PER_S


def _copy(source: torch.device, target: torch.device, nbytes: int) -> Callable[[], object]:
    pinned = source.type != target.type
    ends = [
        # Written once, so that the pages are there.
        torch.zeros(nbytes, dtype=torch.uint8, device=end, pin_memory=pinned and end.type == "cpu").fill_(1)
        for end in (source, target)
    ]
    return lambda: ends[1].copy_(ends[0], non_blocking=True)
