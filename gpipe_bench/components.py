"""The switchable components of the pipeline, as one frozen value.

torchgpipe (Kim et al., arXiv 2004.09910, section 3 and the ablation of section 4) adds its components one after
the other; here each one switches on its own. Whatever is switched, loss and gradients stay those of the plain
``nn.Sequential``: a switch changes time and memory, never results. Without ``shared`` they may differ by rounding.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Final

__all__ = ["PUBLISHED", "Components"]

# Label slots in the order of the published names, then the components that were never switched in print.
_SLOTS: Final = (
    ("fork_join", "dep"),
    ("copy_streams", "str"),
    ("portals", "ptl"),
    ("clock_cycle", "clk"),
    ("early_recompute", "rec"),
    ("shared", "shr"),
)
_OFF: Final = "x"
_BASELINE: Final = "baseline"


@dataclass(frozen=True, slots=True)
class Components:
    """Which components of the pipeline are on.

    Attributes:
        clock_cycle: tasks are issued in clock-cycles, each partition by its own worker. Off: one host thread
            issues them micro-batch by micro-batch.
        fork_join: edges in the autograd graph make every partition run its backward passes from the last
            micro-batch to the first. Off: autograd's ready queue decides.
        copy_streams: copies run on streams of their own, one per device and micro-batch. Off: they run on the
            compute streams and stall them.
        portals: a skip tensor goes from its source to its destination device in one hop. Off: it rides in the
            micro-batch's tuple through every partition between.
        early_recompute: a checkpointed partition is recomputed while its gradient is still on its way. Off:
            only when the gradient has arrived.
        shared: a skip that several layers read is copied once to each device. Off: once for each of these layers, from
            where it was stashed. Without such a skip it changes nothing.
    """

    clock_cycle: bool = True
    fork_join: bool = True
    copy_streams: bool = True
    portals: bool = True
    early_recompute: bool = True
    shared: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise TypeError(f"{field.name} must be True or False, got {value!r}; pass a bool")

    @property
    def label(self) -> str:
        """The published name, or its form for a combination that was never published.

        Three slots, ``dep-str-ptl``, with ``x`` for what is off; ``baseline`` for ``x-x-x``. Two more slots,
        ``clk-rec``, follow when clock-cycle or early recompute is off: ``dep-str-ptl-x-rec``. A sixth one, ``shr``,
        follows when copies are not shared: ``dep-str-ptl-clk-rec-x``.
        """
        slots = [name if getattr(self, attribute) else _OFF for attribute, name in _SLOTS]
        if self.shared:
            slots = slots[: 3 if self.clock_cycle and self.early_recompute else 5]
        label = "-".join(slots)
        return _BASELINE if label == "x-x-x" else label

    @classmethod
    def from_label(cls, label: str) -> Components:
        """The components that a label names.

        Raises:
            TypeError: the label is no string.
            ValueError: it has not the form of :attr:`label`.
        """
        if not isinstance(label, str):
            raise TypeError(f"variant must be a label such as 'dep-str-ptl', got {label!r}; pass a string")
        slots = ("x-x-x" if label == _BASELINE else label).split("-")
        if len(slots) in (3, 5):
            slots += [name for _, name in _SLOTS[len(slots) :]]
        well_formed = len(slots) == len(_SLOTS) and all(
            slot in (name, _OFF) for slot, (_, name) in zip(slots, _SLOTS, strict=False)
        )
        if not well_formed:
            known = [each.label for each in cls.factorial(shared=True)]
            close = difflib.get_close_matches(label.lower(), known, n=1)
            instead = repr(close[0]) if close else f"one of the published names {', '.join(PUBLISHED)} or that form"
            raise ValueError(
                f"variant must be 'baseline' or slots like 'dep-str-ptl' or 'dep-str-ptl-clk-rec' with 'x' for "
                f"what is off, got {label!r}; use {instead}"
            )
        return cls(**{attribute: slot != _OFF for slot, (attribute, _) in zip(slots, _SLOTS, strict=True)})

    @classmethod
    def factorial(cls, *, shared: bool = False) -> Iterator[Components]:
        """All 2^5 combinations, everything on first; 2^6 if ``shared`` is switched, too."""
        for values in product((True, False), repeat=len(cls.switched(shared=shared))):
            yield cls(*values)

    @classmethod
    def switched(cls, *, shared: bool = False) -> tuple[str, ...]:
        """The names of the components that :meth:`factorial` switches."""
        names = tuple(field.name for field in fields(cls))
        return names if shared else names[:-1]


PUBLISHED: Final = ("baseline", "dep-x-x", "dep-str-x", "dep-str-ptl")
"""The four variants of torchgpipe's ablation, in the order in which components were added."""
