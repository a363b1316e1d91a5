"""Portal: a skip goes from the partition that stashes it to the one that pops it, in one hop.

torchgpipe (arXiv 2004.09910, section 3.3) moves the tensor outside the graph and leaves phonies in it. Here the graph
has the tensor itself: a node from its stash to its pop, past all partitions between. The hop is a Copy in every other
respect. Without portals a skip rides in the tuple of its micro-batch through each of these partitions.
"""

from __future__ import annotations

from torch import Tensor

from gpipe_bench.engine.holding import Holding
from gpipe_bench.engine.nodes import apply
from gpipe_bench.engine.paper.copy import Copy
from gpipe_bench.engine.streams import use_stream
from gpipe_bench.engine.transfer import Route

__all__ = ["portal"]


class Portal(Copy):
    """(route, holding, skip) -> skip on the target device."""


def portal(route: Route, holding: Holding, skip: Tensor) -> Tensor:
    """Move a skip along ``route``."""
    with use_stream(route.source.copying), use_stream(route.target.copying):
        (moved,) = apply(Portal, route, holding, skip)
    there: Tensor = moved
    return there
