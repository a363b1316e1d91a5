"""Hardware profiles on disk as simulations need them: reading one by its rules takes longer than many simulations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.simulator.hardware.machine import MachineNumbers, NumberedMachine, Way
from gpipe_bench.simulator.tracing.trace_cache import read, write

if TYPE_CHECKING:
    from gpipe_bench.simulator.hardware.profile import Profile

__all__ = ["KnownProfile", "kept_profile", "known"]

_PROFILES: Final = Path(__file__).parents[1] / "profiles"
_READING: Final = ("hardware/*.py",)


class KnownProfile:
    """A profile whose numbers are known, though it may not have been read.

    Args:
        settings: all that the profile says, as JSON.
        numbers: of its machine.
        profile: the profile, or the name of one that comes with the package.

    Attributes:
        machine: of its devices.
    """

    def __init__(self, settings: str, numbers: MachineNumbers, profile: Profile | str) -> None:
        self.settings = settings
        self.machine = NumberedMachine(numbers)
        self._profile = profile

    @cached_property
    def profile(self) -> Profile:
        """The profile itself, read when it is first asked for."""
        if not isinstance(self._profile, str):
            return self._profile
        # What checks it takes longer to load than all else.
        from gpipe_bench.simulator.hardware.profile import load_profile

        return load_profile(self._profile)


def known(profile: Profile) -> KnownProfile:
    """A profile that has been read."""
    from gpipe_bench.simulator.hardware.profile import machine_numbers

    return KnownProfile(profile.model_dump_json(), machine_numbers(profile), profile)


def kept_profile(name: str, folder: Path) -> KnownProfile:
    """A profile that comes with the package; what is known of it is stored until its file changes.

    Args:
        name: of the profile.
        folder: where it is kept.

    Raises:
        OSError: there is no such profile.
    """
    key = {"profile": name, "text": (_PROFILES / f"{name}.yaml").read_text(encoding="utf-8")}

    def decode(data: Mapping[str, Any]) -> KnownProfile:
        *numbers, within, across, host = data["numbers"]
        made = MachineNumbers._make([*numbers, Way(*within), Way(*across), Way(*host)])
        return KnownProfile(str(data["settings"]), made, name)

    found = read(folder, key, decode, _READING)
    if found is None:
        from gpipe_bench.simulator.hardware.profile import load_profile

        found = known(load_profile(name))
        write(folder, key, {"settings": found.settings, "numbers": found.machine.numbers}, _READING)
    return found
