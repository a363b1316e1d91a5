"""What is simulated: the settings of one cell in virtual time, named like measured cells. Imports no PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.networks import NETWORK, problems_of_hosts
from gpipe_bench.machine.profile import load_profile, profile_file
from gpipe_bench.schedules.table import shared_devices
from gpipe_bench.settings import Hosts, Setting, any_text, whole
from gpipe_bench.step.request import Flavour, LaunchUs, Masters, Optimizer, Precision, Request, StepsOverlap, Tf32
from gpipe_bench.suite.cells import Cell
from gpipe_bench.suite.names import readable
from gpipe_bench.suite.settings import (
    Problem,
    Variant,
)


def _profile(value: Any) -> Any:
    if set(str(value)) & set("{}"):
        # In Snakemake's names of files braces hold wildcards.
        raise ValueError(f"must be a path without braces, got {value!r}; rename the file or its folder")
    try:
        load_profile(str(value))
    except ConfigError as error:
        raise ValueError("\n".join(problem.removeprefix("profile ") for problem in error.problems)) from None
    return value


Devices = Annotated[int, whole("devices that partitions share; 0: one for each of the schedule", 0, 4096)]
Profile = Annotated[str, Setting("hardware: name of a profile, or path of a YAML file", _profile, {"type": "string"})]
Network = Annotated[str, any_text("link between hosts, by name: ndr400, ethernet10, or a link of the profile")]


def host_problems(section: Any, devices: int, transfer: str) -> Iterator[Problem]:
    """What is wrong about the hosts of a section with ``hosts``, ``network`` and ``profile``."""
    given = {"hosts": section.hosts, "network": section.network, "devices": devices, "transfer": transfer}
    for setting, text in problems_of_hosts(load_profile(section.profile), **given):
        yield Problem((setting,), text)


_IN_EVERY_KEY: Final = frozenset(
    {*Cell.model_fields, "optimizer", "profile", "flavour", "host_time", "steps"} - {"evidence"}
)
"""Settings that are part of a key even where they are as usual; others are left out, so that older keys stay."""


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
    def key_word(self) -> str:
        """The name of the profile."""
        return readable(self.hardware)

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``simulate`` and ``emulate`` that it decides, but model, balance and devices."""
        own = {"components", *type(self).model_fields} - {"model", "balance", "devices"}
        return {field.name: getattr(self, field.name) for field in fields(Request) if field.name in own}

    def columns(self) -> dict[str, Any]:
        """The columns of a row that the cell decides."""
        return {**super().columns(), "optimizer": self.optimizer, "steps_overlap": self.steps_overlap}

    @property
    def device_numbers(self) -> list[int]:
        """The device of each one of the schedule; neighbours share one where there are too few."""
        return shared_devices(self.schedule_devices, self.devices or self.schedule_devices)

    def problems(self) -> Iterator[Problem]:
        """Rules of every pipeline, and no more devices than it fills."""
        yield from super().problems()
        if self.devices > self.schedule_devices:
            text = f"must be at most {self.schedule_devices} for {self.partitions} partitions, got {self.devices}"
            yield Problem(("devices", "partitions", "schedule"), f"{text}; lower it")

    def settings(self) -> dict[str, Any]:
        """All settings but the kind of evidence, and what is as usual."""
        data = super().settings()
        fields = type(self).model_fields.items()
        usual = {name for name, field in fields if name not in _IN_EVERY_KEY and data.get(name) == field.default}
        usual |= {"devices"} if self.devices == self.schedule_devices else set()
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
        """All settings but what is as usual; a network only where there are hosts that it links."""
        data = super().settings()
        data.pop("network", None)
        return data if self.hosts == 1 else {**data, "network": self.network}
