"""Profiles with fitted efficiencies: a fit ends with an error where a profile with its shares could not be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from gpipe_bench.errors import ConfigError
from gpipe_bench.simulator.hardware.profile import Efficiency, Profile

__all__ = ["fitted_profile"]

_DIGITS: Final = 3


def fitted_profile(profile: Profile, shares: Mapping[str, float | None]) -> Profile:
    """The profile with fitted shares, of three digits after the point.

    Args:
        profile: the device.
        shares: efficiency -> its share; None for one that the profile does not have.

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
