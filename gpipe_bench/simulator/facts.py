"""What of a layer does not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LayerFacts"]


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """A layer's parameters, buffers and skips.

    Attributes:
        parameters: elements of each trained parameter that no earlier layer has.
        parameter_bytes: of trained parameters, without gradients.
        others: bytes of each frozen parameter and buffer.
        stashes: skips that the layer stashes, by number: its place among all stashes of the model.
        pops: skips that it pops, by the same number.
    """

    parameters: tuple[int, ...]
    parameter_bytes: int
    others: tuple[int, ...]
    stashes: tuple[int, ...]
    pops: tuple[int, ...]
