"""Loads torchvision and timm on first use, and says what to install where they are absent."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
from typing import Any

from gpipe_bench.errors import ConfigError

_KEPT: list[Any] = []  # A library's declarations last as long as the object.


def load_torchvision() -> Any:
    """The module ``torchvision.models``.

    Raises:
        ConfigError: torchvision is not installed.
    """
    _declare_operators()
    return _load("torchvision.models", "torchvision")


def load_timm() -> Any:
    """The module ``timm``, which loads torchvision.

    Raises:
        ConfigError: timm is not installed.
    """
    load_torchvision()
    return _load("timm", "timm")


def _load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        extra = "pip install 'gpipe-bench[models]'"
        raise ConfigError([f"{package} must be installed for its models, got no such package; {extra}"]) from error


def _declare_operators() -> None:
    """Declare the operators that a torchvision without its compiled library fails for at import.

    Torchvision from PyPI is built for CUDA. Beside a PyTorch for the CPU its library does not load, and the import ends
    with "operator torchvision::nms does not exist", since shape functions are registered for operators that nobody
    declared. No classification network calls them, so a declaration is enough. Where the library loads, nothing is
    done here; a declaration that comes before the library's own would be refused there.
    """
    import torch

    if _KEPT or importlib.util.find_spec("torchvision") is None or _compiled_library_loads():
        return
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]  # PyTorch's
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        library.define(schema)  # type: ignore[no-untyped-call]  # PyTorch's
    _KEPT.append(library)


def _compiled_library_loads() -> bool:
    """Whether torchvision's operators can be had: as its own import does, by loading its library."""
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return True
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None  # noqa: S101 - the caller has found it
    for folder in spec.submodule_search_locations or ():
        found = importlib.machinery.PathFinder.find_spec("_C", [folder])
        if found is not None and found.origin is not None:
            try:
                torch.ops.load_library(found.origin)  # type: ignore[no-untyped-call]  # PyTorch's
            except OSError:
                return False
            return hasattr(torch.ops.torchvision, "nms")
    return False
