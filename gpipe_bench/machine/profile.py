"""Hardware as data: what a device computes, how fast its memory is, and how devices are linked.

A profile is a YAML file; those of this package are in ``profiles/``. For other hardware write such a file and pass its
path; nothing else needs to change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.constants import DIRECT_SHARE, FAST_SHARE, Constant, constant_problems
from gpipe_bench.machine.hardware import PROFILES, WAYS, HardwareMachine
from gpipe_bench.util.files import is_file
from gpipe_bench.util.nearest import nearest
from gpipe_bench.util.yaml_text import read_yaml

__all__ = [
    "PROFILES",
    "Efficiency",
    "HardwareMachine",
    "Link",
    "Profile",
    "Topology",
    "load_profile",
    "parse_profile",
    "profile_file",
    "profile_names",
]

_FASTEST: Final = 1e5
"""Largest rate in a profile, 10^17 FLOP or 10^14 bytes per second: what is faster was written in another unit."""

_GIB: Final = 2**30
_ORDINARY: Final = ("bfloat16", "float16", "float32", "float64")
_MATRIX: Final = (*_ORDINARY, "float8_e4m3fn", "float8_e5m2", "int8", "tensorfloat32")
_TYPES: Final = MappingProxyType({"peak_tflops": _ORDINARY, "matrix_tflops": _MATRIX})
_CONVOLUTION_UNITS: Final = {"float32": "tensorfloat32", "float64": ""}
_PARTS: Final = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


_SIZE_OR_FORM: Final = re.compile(r"\b\d+ ?gi?b\b|\b(sxm|hbm|gddr|pcie)\d*e?\b")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Link(_Section):
    """A way between two memories."""

    gb_per_s: float = Field(gt=0, le=_FASTEST, description="usable bandwidth per direction, 10^9 bytes per second")
    latency_us: float = Field(ge=0, description="time of an empty transfer, microseconds")
    shared: bool = Field(
        default=False, description="whether transfers between the same two groups, in one direction, take turns"
    )


class Topology(_Section):
    """Which devices are near each other: consecutive devices form groups, such as those of one socket."""

    group_size: int = Field(gt=0, description="devices per group")
    within: str = Field(description="link between devices of one group")
    across: str = Field(description="link between devices of different groups")
    host: str = Field(description="link between a device and pinned host memory")


class Efficiency(_Section):
    """The share of its peak that each class of kernels reaches: see :mod:`gpipe_bench.kernels.roofline`.

    Where the profile has constants, these shares are those of recurrences and of copies within a device alone. Above 1
    are only convolutions whose algorithm may need fewer FLOPs than the direct one, which are counted.
    """

    conv3x3_stride1: float = Field(gt=0, le=FAST_SHARE, description="of the peak, in FLOPs of the direct algorithm")
    spatial_conv: float | None = Field(
        default=None,
        gt=0,
        le=FAST_SHARE,
        description="of the peak, other convolutions wider than 1x1; None: as other_conv_matmul",
    )
    other_conv_matmul: float = Field(gt=0, le=DIRECT_SHARE, description="of the peak")
    matmul: float | None = Field(
        default=None, gt=0, le=DIRECT_SHARE, description="of the peak; None: as other_conv_matmul"
    )
    memory_bound: float = Field(gt=0, le=DIRECT_SHARE, description="of the memory bandwidth")
    origin: Literal["fitted", "measured", "assumed"] = Field(description="where the numbers come from")


class Profile(_Section):
    """One kind of device, and how a machine links several of them."""

    name: str = Field(min_length=1, description="name of the profile")
    device: str = Field(min_length=1, description="name of the device")
    memory_gib: float = Field(gt=0, description="memory that the driver reports, GiB")
    context_gib: float = Field(ge=0, description="taken by the context before the first tensor, GiB")
    bandwidth_gb_per_s: float = Field(gt=0, le=_FASTEST, description="memory bandwidth, 10^9 bytes per second")
    peak_tflops: dict[str, float] = Field(description="peak of the ordinary units by dtype, 10^12 FLOP per second")
    matrix_tflops: dict[str, float] = Field(default={}, description="peak of the matrix units by dtype, dense")
    winograd: bool = Field(
        description="whether 3x3 convolutions of stride 1 run by Winograd's algorithm, but on matrix units"
    )
    efficiency: Efficiency
    kernel_floor_us: float = Field(ge=0, description="shortest kernel, microseconds")
    launch_us: float = Field(ge=0, description="host time per kernel, microseconds")
    kernels: dict[str, Constant] | None = Field(
        default=None, description="constants of kinds of kernels; None: efficiency and kernel_floor_us say all"
    )
    cublas_workspace_mib: float = Field(
        default=0, ge=0, description="what PyTorch allocates for each cuBLAS handle and stream, MiB"
    )
    queue_depth: int = Field(gt=0, description="launches that a device holds before the host waits")
    links: dict[str, Link]
    topology: Topology
    sources: dict[str, str] = Field(description="where the numbers come from")

    @field_validator("context_gib")
    @classmethod
    def _smaller_than_memory(cls, context: float, info: ValidationInfo) -> float:
        if context >= info.data.get("memory_gib", context + 1):
            raise ValueError(f"context_gib must be less than memory_gib, got {context}; correct one of them")
        return context

    @field_validator("peak_tflops", "matrix_tflops")
    @classmethod
    def _rates(cls, rates: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        table, problems = str(info.field_name), []
        if table == "peak_tflops" and "float32" not in rates:
            problems.append(f"peak_tflops must have float32, got {sorted(rates)}; add it")
        for dtype, value in rates.items():
            name = f"{table}.{dtype}"
            if dtype not in _TYPES[table]:
                hint = nearest(dtype, _TYPES[table])
                problems.append(f"{name} must be the rate of a known type, got {dtype!r}; {hint}")
            if value <= 0:
                problems.append(f"{name} must be positive, got {value:g}; leave it out if the device has no such units")
            if value > _FASTEST:
                problems.append(f"{name} must be at most {_FASTEST:g}, got {value:g}; write 10^12 FLOP per second")
        if problems:
            raise ValueError("\n".join(problems))
        return rates

    @field_validator("topology")
    @classmethod
    def _of_known_links(cls, topology: Topology, info: ValidationInfo) -> Topology:
        links = info.data.get("links")
        # Without, they are wrong themselves.
        problems = (
            []
            if links is None
            else [
                f"topology.{way} must name one of links, got {link!r}; "
                + (nearest(link, sorted(links)) if links else "links is empty, add it there")
                for way in WAYS
                if (link := getattr(topology, way)) not in links
            ]
        )
        if problems:
            raise ValueError("\n".join(problems))
        return topology

    @field_validator("kernels")
    @classmethod
    def _of_the_law(cls, kernels: dict[str, Constant] | None) -> dict[str, Constant] | None:
        problems = constant_problems(kernels) if kernels is not None else []
        if problems:
            raise ValueError("\n".join(problems))
        return kernels

    @cached_property
    def constants(self) -> dict[str, float]:
        """The values of :attr:`kernels`, by name; empty without."""
        return {name: constant.value for name, constant in (self.kernels or {}).items()}

    @property
    def settings(self) -> dict[str, Any]:
        """What it was made of, by name."""
        return {name: getattr(self, name) for name in Profile.model_fields}

    @property
    def host_us(self) -> float:
        """Host time per kernel, microseconds."""
        return self.constants.get("launch_us", self.launch_us)

    @property
    def has_own_host(self) -> bool:
        """Whether the host time of a launch was measured, and not on the host of a profile of this package."""
        own = (self.kernels or {}).get("launch_us")
        return own is not None and own.origin == "measured" and self.name not in profile_names()

    @property
    def capacity_bytes(self) -> int:
        """Memory for tensors, bytes."""
        return int((self.memory_gib - self.context_gib) * _GIB)

    def adapted(self, tf32: bool | None = None, launch_us: float | None = None) -> Profile:
        """The device as it is used.

        Args:
            tf32: whether float32 is rounded to TF32 everywhere or nowhere; None: in convolutions, as by default.
            launch_us: host time per kernel; None: the profile's. Its time for a parameter changes as much.
        """
        changes: dict[str, Any] = {}
        rate = self.matrix_tflops.get("tensorfloat32")
        if tf32 is not None and rate is not None:
            units = {dtype: value for dtype, value in self.matrix_tflops.items() if dtype != "tensorfloat32"}
            changes["matrix_tflops"] = self.matrix_tflops | {"float32": rate} if tf32 else units
        if launch_us is not None:
            changes["launch_us"] = launch_us
            if self.kernels is not None:
                slower = launch_us / self.host_us
                of_host = {"launch_us": launch_us, "parameter_us": slower * self.constants.get("parameter_us", 0)}
                own = {name: Constant(value=us, origin="assumed") for name, us in of_host.items() if us}
                changes["kernels"] = {**self.kernels, **own}
        return Profile(**self.settings | changes) if changes else self

    def uses_winograd(self, dtype: str) -> bool:
        """Whether 3x3 convolutions of stride 1 run by Winograd's algorithm: on matrix units they are direct ones."""
        return self.winograd and _units("convolution", dtype) not in self.matrix_tflops

    def peak_flop_per_s(self, arithmetic: str, dtype: str) -> float:
        """Peak rate of a convolution or matrix product.

        In float32, PyTorch's defaults let convolutions use TF32 where a device has it, and matrix products not; in
        float64, only products run on matrix units. Types of two bytes for which there are no units are computed in
        float32, complex ones by their parts.

        Raises:
            ConfigError: the profile does not say how fast float64 is.
        """
        dtype = _PARTS.get(dtype, dtype)
        tflops = self.matrix_tflops.get(_units(arithmetic, dtype)) or self.peak_tflops.get(dtype)
        if tflops is None and dtype == "float64":
            raise ConfigError(
                [f"profile {self.name}: peak_tflops must have float64 for a model of that type, got none; add it"]
            )
        return (tflops or self.peak_tflops["float32"]) * 1e12


def _units(arithmetic: str, dtype: str) -> str:
    """The type of the matrix units for operands of a type; '' for none."""
    return _CONVOLUTION_UNITS.get(dtype, dtype) if arithmetic == "convolution" else dtype


def known_profile(model: str) -> Profile | None:
    """The profile of this package for a device, by its name as the driver prints it; None if there is none."""
    profiles = (load_profile(name) for name in profile_names())
    return next((profile for profile in profiles if is_of_device(model, profile.device)), None)


def is_of_device(measured: str, device: str) -> bool:
    """Whether ``measured``, as the driver names a device, may be ``device``, as a profile names it.

    They differ in brand, form and memory; what counts are words such as A100 or 4090.
    """
    return bool(_models(device) & _models(measured))


def _models(name: str) -> set[str]:
    return {word for word in re.findall(r"[a-z0-9]+", _SIZE_OR_FORM.sub(" ", name.lower())) if re.search(r"\d", word)}


def profile_names() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def profile_file(name: str | Path) -> Path:
    """The file of the profile of that name, if it comes with the package; else the path as it is."""
    own = PROFILES / f"{name}.yaml"
    return own if own.parent == PROFILES and is_file(own) else Path(name)


def load_profile(name: str | Path) -> Profile:
    """The profile of that name, or in the YAML file of that path.

    Raises:
        ConfigError: there is none, or it breaks rules; all problems at once.
    """
    path = profile_file(name)
    if not is_file(path):
        hint = nearest(str(name), profile_names())
        hint = "check the name, or the path" if hint.startswith("use one of") else hint
        raise ConfigError(
            [f"profile must be one of {', '.join(profile_names())} or a YAML file, got {str(name)!r}; {hint}"]
        )
    try:
        return _parsed(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError([f"profile must be a readable file, got {path} ({error}); check the path"]) from error


@lru_cache(maxsize=64)
def _parsed(content: bytes, path: str) -> Profile:
    """The profile in a file of that content: thousands of cells ask for theirs."""
    try:
        data = read_yaml(content.decode())
    except ValueError as error:
        raise ConfigError([f"profile must be YAML, got an error in {path}: {error}; correct that line"]) from error
    return parse_profile(data, path)


def parse_profile(data: object, where: str = "profile") -> Profile:
    """A profile from plain data.

    Args:
        data: what the YAML file holds.
        where: named in every problem.

    Raises:
        ConfigError: all problems at once.
    """
    if not isinstance(data, Mapping):
        raise ConfigError([f"{where} must be a mapping of settings, got {type(data).__name__}; see profiles/p40.yaml"])
    try:
        return Profile.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError([f"{where}: {line}" for item in error.errors() for line in _problems(item)]) from None


def _problems(error: Any) -> Sequence[str]:
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "value_error":
        return str(error["ctx"]["error"]).splitlines()
    if error["type"] == "missing":
        return [f"{name} must be given, got nothing; add it"]
    if error["type"] == "less_than_equal":
        unit = "a share, not percent" if error["loc"][0] == "efficiency" else "10^9 bytes per second"
        return [f"{name} must be at most {error['ctx']['le']:g}, got {float(error['input']):g}; write {unit}"]
    if error["type"] == "extra_forbidden":
        known = [field for section in (Profile, Link, Topology, Efficiency, Constant) for field in section.model_fields]
        hint = nearest(str(error["loc"][-1]), known)
        hint = "remove it" if hint.startswith("use one of") else hint
        return [f"{name} must be a setting of a profile, got an unknown one; {hint}"]
    return [f"{name} must satisfy '{error['msg']}', got {error['input']!r}; correct it"]
