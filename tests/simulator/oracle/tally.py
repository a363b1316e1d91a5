"""What tensors take, whatever an allocator makes of it: bytes asked for and not given back."""

from __future__ import annotations

from tests.simulator.oracle.allocator import Allocator, Block

__all__ = ["Tally"]


class Tally(Allocator):
    """In place of an allocator: no segments and no limit; ``live`` and ``peak_live`` are all that counts."""

    tallies = True

    def alloc(self, nbytes: int, stream: int) -> Block:
        """Count a tensor."""
        self.count(nbytes, 0, nbytes, 0)
        return Block(self, 0, 0, nbytes, stream)

    def retire(self, block: Block) -> None:
        """Whatever other streams still do with it."""
