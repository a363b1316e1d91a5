"""The colours and names of tasks, the same in figures, report and playground.

Forward, recomputation and backward are sky, yellow and orange; of a backward pass that is split, I is the light orange
and W is green. Any two of the five differ by 15 or more in CIELAB, and by 26 where no one is blue-yellow blind, with
normal sight and with the common colour deficiencies, so boxes of four pixels are told apart without a word in
them. Dark text has a contrast of 4.5 or more on each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

ACTION_COLOURS: Final = {"F": "#56B4E9", "R": "#F0E442", "B": "#E0702B", "I": "#F9C489", "W": "#009E73"}
"""Fill of each kind of action of a schedule."""

COPY_COLOURS: Final = {"copy": "#CC79A7", "copy_grad": "#8C4470", "portal": "#0072B2", "portal_grad": "#004065"}
"""Fill of each kind of copy; a gradient is darker than what it is the gradient of."""

ACTION_WORDS: Final = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
}
"""What each kind of action is called."""

KIND_WORDS: Final = {
    "forward": ACTION_WORDS["F"],
    "recompute": ACTION_WORDS["R"],
    "backward": ACTION_WORDS["B"],
    "backward_inputs": ACTION_WORDS["I"],
    "backward_weights": ACTION_WORDS["W"],
    "copy": "copy",
    "copy_grad": "copy of a gradient",
    "portal": "portal",
    "portal_grad": "portal of a gradient",
}
"""What each kind of task of a recorded step is called."""

KIND_COLOURS: Final = {
    "forward": ACTION_COLOURS["F"],
    "recompute": ACTION_COLOURS["R"],
    "backward": ACTION_COLOURS["B"],
    "backward_inputs": ACTION_COLOURS["I"],
    "backward_weights": ACTION_COLOURS["W"],
    **COPY_COLOURS,
}
"""Fill of each kind of task of a recorded step."""

LATER_PARTITION: Final = ("#06142E", 0.3)
"""What lies over a task of the last partition of a device, and how much of it; the first partition has nothing."""

TIMELINE_JS: Final = Path(__file__).with_name("timeline.js")
"""The script that draws lanes, boxes, memory and the axis of time on a canvas."""


def later(colour: str, depth: float = 1.0) -> str:
    """The colour of a task of a later partition of its device.

    Args:
        colour: of a task of the first partition, as ``#RRGGBB``.
        depth: 0 for the first partition of a device, 1 for the last one.
    """
    over, share = LATER_PARTITION
    mixed = (
        round((1 - depth * share) * int(colour[k : k + 2], 16) + depth * share * int(over[k : k + 2], 16))
        for k in (1, 3, 5)
    )
    return "#" + "".join(f"{value:02X}" for value in mixed)
