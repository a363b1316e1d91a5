"""The data files that the package brings along, found in the same way in a checkout and in an installed package.

In a checkout the folders here are links to ``results/reference`` and ``config``. An installed package holds the files
themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gpipe_bench.errors import ConfigError

__all__ = [
    "DEFAULT_CONFIG",
    "PUBLISHED_FOLDER",
    "REFERENCE_FOLDER",
    "TOLERANCES",
    "checkout_folder",
    "needed_checkout",
]

_DATA: Final = Path(__file__).resolve().parent

REFERENCE_FOLDER: Final = (_DATA / "reference").resolve()
"""Folder of the reference results: published, simulated, emulated and measured tables."""

PUBLISHED_FOLDER: Final = REFERENCE_FOLDER / "published"
"""Folder of the published values and the settings that they were taken at."""

DEFAULT_CONFIG: Final = (_DATA / "config" / "config.yaml").resolve()
"""The default configuration of the suite."""

TOLERANCES: Final = (_DATA / "config" / "tolerances.csv").resolve()
"""Table of tolerances, for ``gpipe-bench verify``."""


def checkout_folder() -> Path | None:
    """The root of the checkout that this package runs from; ``None`` for an installed copy."""
    root = _DATA.parents[1]
    return root if (root / "Snakefile").is_file() and (root / "pyproject.toml").is_file() else None


def needed_checkout(what: str) -> Path:
    """The root of the checkout, for what cannot work without.

    Args:
        what: names it in the message, such as ``effects --write``.

    Raises:
        ConfigError: the package is an installed copy.
    """
    root = checkout_folder()
    if root is None:
        raise ConfigError(
            [f"{what} must run from a checkout of gpipe_bench, got an installed package; clone the repository"]
        )
    return root
