"""What is simulated: the settings of one cell in virtual time, named like measured cells. Imports no PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gpipe_bench.bench.spec.cells import Cell
from gpipe_bench.bench.spec.names import readable
from gpipe_bench.bench.spec.settings import (
    Problem,
    Variant,
    no_boolean,
)
from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.networks import NETWORK, problems_of_hosts
from gpipe_bench.machine.profile import MOST_LAUNCH_US, load_profile, profile_file
from gpipe_bench.schedules.table import shared_places
from gpipe_bench.util import choices


def _profile(value: Any) -> Any:
    if set(str(value)) & set("{}"):
        # In Snakemake's names of files braces hold wildcards.
        raise ValueError(f"must be a path without braces, got {value!r}; rename the file or its folder")
    try:
        load_profile(str(value))
    except ConfigError as error:
        raise ValueError("\n".join(problem.removeprefix("profile ") for problem in error.problems)) from None
    return value


Devices = Annotated[
    int, Field(strict=True, ge=0, le=4096, description="devices that partitions share; 0: one for each of the schedule")
]
Tf32 = Annotated[
    bool | None, Field(description="round float32 to TF32; null: in convolutions alone, as PyTorch does it")
]
LaunchUs = Annotated[
    float | None,
    Field(gt=0, le=MOST_LAUNCH_US, description="host time of an operation, microseconds; null: that of the profile"),
    no_boolean,
]
Optimizer = Annotated[choices.Optimizer, Field(description="what updates the parameters after each step")]
Profile = Annotated[
    str, BeforeValidator(_profile), Field(description="hardware: name of a profile, or path of a YAML file")
]
Precision = Annotated[choices.Precision, Field(description="type of weights, activations and gradients")]
Masters = Annotated[
    bool, Field(description="whether the optimizer keeps a copy in float32 of each weight that is in a half")
]
Hosts = Annotated[int, Field(strict=True, ge=1, le=4096, description="hosts that have the devices, as many each")]
Network = Annotated[str, Field(description="link between hosts, by name: ndr400, ethernet10, or a link of the profile")]
StepsOverlap = Annotated[
    bool,
    Field(description="whether a step starts while other devices run the one before; false: it ends on all devices"),
]
Flavour = Annotated[choices.Flavour, Field(description="autograd engine: current, or published for PyTorch 1.3")]


def host_problems(section: Any, devices: int, transfer: str) -> Iterator[Problem]:
    """What is wrong about the hosts of a section with ``hosts``, ``network`` and ``profile``."""
    given = {"hosts": section.hosts, "network": section.network, "devices": devices, "transfer": transfer}
    for setting, text in problems_of_hosts(load_profile(section.profile), **given):
        yield Problem((setting,), text)


class VirtualCell(Cell):
    """One pipeline in one variant, on hardware that need not be here."""

    variant: Variant = "dep-str-ptl"
    optimizer: Optimizer = "sgd"
    profile: Profile = "p40"
    devices: Devices = 0
    tf32: Tf32 = None
    launch_us: LaunchUs = None
    steps_overlap: StepsOverlap = True

    @property
    def hardware(self) -> str:
        """The name of the profile."""
        return load_profile(self.profile).name

    @property
    def hardware_device(self) -> str:
        """What a device of the profile is called."""
        return load_profile(self.profile).device

    @property
    def profile_path(self) -> str:
        """The file of the profile, below the working folder where it lies there."""
        path = profile_file(self.profile)
        return os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path)

    @property
    def place(self) -> str:
        """The name of the profile."""
        return readable(self.hardware)

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``simulate`` and ``emulate`` that it decides, but model, balance and devices."""
        names = ("batch_size", "chunks", "checkpoint", "components", "schedule", "transfer", "optimizer")
        return {name: getattr(self, name) for name in (*names, "profile", "tf32", "launch_us", "steps_overlap")}

    def columns(self) -> dict[str, Any]:
        """The columns of a row that the cell decides."""
        return {**super().columns(), "optimizer": self.optimizer, "steps_overlap": self.steps_overlap}

    @property
    def places(self) -> list[int]:
        """The device of each one of the schedule; neighbours share one where there are too few."""
        return shared_places(self.schedule_devices, self.devices or self.schedule_devices)

    def problems(self) -> Iterator[Problem]:
        """Rules of every pipeline, and no more devices than it fills."""
        yield from super().problems()
        if self.devices > self.schedule_devices:
            text = f"must be at most {self.schedule_devices} for {self.partitions} partitions, got {self.devices}"
            yield Problem(("devices", "partitions", "schedule"), f"{text}; lower it")

    def settings(self) -> dict[str, Any]:
        """All settings but the kind of evidence, and what is as usual."""
        data = super().settings()
        usual = {"evidence"} | {name for name in ("tf32", "launch_us") if data[name] is None}
        usual |= {"steps_overlap"} if self.steps_overlap else set()
        usual |= {"devices"} if self.devices in (0, self.schedule_devices) else set()
        return {name: value for name, value in data.items() if name not in usual}


class SimulatedCell(VirtualCell):
    """One simulation. It has no repeats: the same cell gives the same numbers everywhere."""

    evidence: Literal["simulated"] = "simulated"
    flavour: Flavour = "published"
    precision: Precision = "float32"
    masters: Masters = True
    hosts: Hosts = 1
    network: Network = NETWORK

    def problems(self) -> Iterator[Problem]:
        """Rules of every pipeline, and of its hosts."""
        yield from super().problems()
        yield from host_problems(self, self.devices or self.schedule_devices, self.transfer)

    def settings(self) -> dict[str, Any]:
        """All settings; float32, master weights and a single host are left out, as the schedule of GPipe is."""
        data = super().settings()
        for name, usual in (("precision", "float32"), ("masters", True)):
            if data[name] == usual:
                del data[name]
        if self.hosts == 1:
            del data["hosts"], data["network"]
        return data
