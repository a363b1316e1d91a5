"""Several hosts: networks as data, and a machine of equal hosts that one of them links.

    devices   0 1 2 3 | 4 5 6 7       two hosts of four
    copies    0 -> 3 as in one host   3 -> 4 over the network

Devices are numbered host by host, as partitions are placed on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.profile import HardwareMachine, Link, Profile
from gpipe_bench.util.nearest import nearest
from gpipe_bench.util.yaml_text import read_yaml_file

NETWORK: Final = "ndr400"
"""The default."""
IDEAL: Final = "ideal"
"""The one that costs nothing."""


class Network(Link):
    """A link between hosts; shared if a host has one network card for all of its devices."""

    source: str = Field(min_length=1, description="where the numbers come from")


@cache
def networks() -> Mapping[str, Network]:
    """The networks that come with the package, by name."""
    data = read_yaml_file(Path(__file__).with_name("networks.yaml"))
    return {name: Network.model_validate(values) for name, values in data.items()}


def problems_of_hosts(
    profile: Profile, *, hosts: int, devices: int, network: str | Link, transfer: str
) -> Iterator[tuple[str, str]]:
    """The setting, and what is wrong about it, of devices that are spread over hosts.

    Args:
        profile: of the devices.
        hosts: how many.
        devices: of all hosts together.
        network: between them: a name, a link of the profile, or a link.
        transfer: ``direct`` or ``host``.
    """
    if devices % hosts:
        yield "hosts", f"must divide the {devices} devices evenly, got {hosts}; change one of them"
    if hosts > 1 and transfer == "host":
        advice = "leave transfer out, the network says what copies cost"
        yield "hosts", f"must be 1 where tensors are transferred through host memory, got {hosts}; {advice}"
    known = {*networks(), *profile.links}
    if not isinstance(network, Link) and network not in known:
        rule = f"must be one of {', '.join(networks())}, or a link of {profile.name}, got {network!r}"
        yield "network", f"{rule}; {nearest(network, sorted(known))}"


def machine_of(
    profile: Profile, *, hosts: int, devices: int, network: str | Link, transfer: str = "direct"
) -> HardwareMachine:
    """A machine of equal hosts; the arguments are those of :func:`problems_of_hosts`.

    Raises:
        ConfigError: all problems at once.
    """
    given: dict[str, Any] = {"hosts": hosts, "devices": devices, "network": network, "transfer": transfer}
    if problems := [f"{setting} {text}" for setting, text in problems_of_hosts(profile, **given)]:
        raise ConfigError(problems)
    if hosts == 1:
        return HardwareMachine(profile)
    link = network if isinstance(network, Link) else {**networks(), **profile.links}[network]
    return HardwareMachine(profile, link, devices // hosts)
