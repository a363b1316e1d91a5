"""What of a layer does not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["LayerFacts", "Parameter"]


class Parameter(NamedTuple):
    """A trained parameter: its elements, their type's name, as in ``float32``, and its bytes without the gradient."""

    elements: int
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """A layer's parameters, buffers and skips.

    Attributes:
        parameters: trained ones that no earlier layer has.
        others: bytes of each frozen parameter and buffer.
        stashes: skips that the layer stashes, by number: its place among all stashes of the model.
        pops: skips that it pops, by the same number.
    """

    parameters: tuple[Parameter, ...]
    others: tuple[int, ...]
    stashes: tuple[int, ...]
    pops: tuple[int, ...]
