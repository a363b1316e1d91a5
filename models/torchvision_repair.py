"""Lets ``import torchvision`` succeed where torchvision's compiled library does not load.

Torchvision from PyPI is built for CUDA. Beside a PyTorch for the CPU its compiled library does not load, and the import
ends with "operator torchvision::nms does not exist": the library did not declare the operators that torchvision
registers shape functions for. No classification network calls these operators, so a declaration is enough.

Torchvision first tries to load the library, then imports the module with the shape functions. In between
:func:`mend_torchvision` declares the operators, if the library has not: it can no longer declare them itself.

The commands of this package call it. Set-up lets every Python of its environment call it as it starts, with this file
and a line in ``torchvision_repair.pth``; so this file imports nothing that takes time.
"""

from __future__ import annotations

import sys

_LOADS_LIBRARY = "torchvision.extension"
_REGISTERS_SHAPES = "torchvision._meta_registrations"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept: list[object] = []  # Declarations last as long as their object.


def mend_torchvision() -> None:
    """Let every later ``import torchvision`` in this process succeed, a user's own, too; imports nothing itself."""
    if not any(isinstance(finder, _Mender) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Mender())


class _Mender:
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
