"""Loads torchvision and timm on first use, also a torchvision whose compiled library does not load."""

from __future__ import annotations

import importlib
from typing import Any

from gpipe_bench.errors import ConfigError
from gpipe_bench.models.torchvision_repair import mend_torchvision


def load_torchvision() -> Any:
    """The module ``torchvision.models``.

    Raises:
        ConfigError: torchvision is not installed.
    """
    return _load("torchvision.models", "torchvision")


def load_timm() -> Any:
    """The module ``timm``, which loads torchvision.

    Raises:
        ConfigError: timm or torchvision is not installed.
    """
    load_torchvision()
    return _load("timm", "timm")


def _load(module: str, package: str) -> Any:
    mend_torchvision()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        extra = "pip install 'gpipe-bench[models]'"
        raise ConfigError([f"{package} must be installed for its models, got no such package; {extra}"]) from error
