"""Small variants of every registered model, and of some that libraries have, for tests that all of them go through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        arguments: that make it small.
        layers: how many a good cut gives at least.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    layers: int = 1


_DECODER = {"L": 2, "D": 8, "heads": 2, "kv": 1, "hidden": 12, "vocabulary": 11, "context": 6}

CASES = {
    "unet": Case({"depth": 2, "B": 1, "C": 4, "size": 16}, 29),
    "amoebanet-d": Case({"L": 3, "D": 8, "size": 64, "classes": 5}, 9),
    "vit": Case({"L": 2, "D": 8, "heads": 2, "size": 8, "patch": 4, "classes": 5}, 6),
    **dict.fromkeys(
        ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
        Case({"L": 2, "D": 8, "heads": 2, "vocabulary": 11, "context": 6, "dropout": 0.0}, 6),
    ),
    "decoder": Case({**_DECODER, "L": 3}, 5),
    "attention-residuals": Case({**_DECODER, "L": 4, "block": 2}, 6),
    "hyper-connections": Case({**_DECODER, "streams": 2}, 4),
    "experts": Case({**_DECODER, "experts": 4}, 4),
    "multi-token": Case({**_DECODER, "ahead": 1}, 5),
    "captions": Case({**_DECODER, "V": 1, "width": 8, "vheads": 2, "size": 8, "patch": 4}, 6),
    "examples/my_model.py:mlp": Case({"depth": 5, "width": 8}, 6),
    "torchvision/resnet18": Case({"size": 32, "classes": 5}, 15),
    "timm/vit_tiny_patch16_224": Case({"size": 32, "classes": 5}, 36),
}
