"""Loads torchvision and timm on first use, also a torchvision whose compiled library does not load.

Torchvision from PyPI is built for CUDA. Beside a PyTorch for the CPU its compiled library does not load, and the import
ends with "operator torchvision::nms does not exist": the library did not declare the operators that torchvision
registers shape functions for. No classification network calls these operators, so a declaration is enough.

Torchvision first tries to load the library, then imports the module with the shape functions. In between
:func:`mend_torchvision` declares the operators, if the library has not: it can no longer declare them itself.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from typing import Any, Final

from gpipe_bench.errors import ConfigError

_LOADS_LIBRARY: Final = "torchvision.extension"
_REGISTERS_SHAPES: Final = "torchvision._meta_registrations"
_SCHEMAS: Final = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept: list[Any] = []  # Declarations last as long as their object.


def mend_torchvision() -> None:
    """Let every later ``import torchvision`` in this process succeed, a user's own, too; imports nothing itself."""
    if not any(isinstance(finder, _Mender) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Mender())


class _Mender(MetaPathFinder):
    """Finds no module: it is asked for each one before it is imported."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:  # noqa: ARG002 - Python's
        if fullname == _REGISTERS_SHAPES and _LOADS_LIBRARY in sys.modules:
            _declare_operators()


def _declare_operators() -> None:
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]  # PyTorch's
    for schema in _SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]  # PyTorch's
    _kept.append(library)


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
