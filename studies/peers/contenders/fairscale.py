"""fairscale: its Pipe, which was made from torchgpipe and has its interface."""

from __future__ import annotations

from studies.peers.contenders import torchgpipe
from studies.peers.seat import Seat, Step

PIPE, SKIP = ("fairscale.nn", "Pipe"), "fairscale.nn.pipe.skip"


def build(seat: Seat) -> Step:
    """The step of fairscale."""
    return torchgpipe.build(seat, PIPE, SKIP)
