"""What a step is to minimise, in the process with the last partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gpipe_bench.engine.runtime.loss import check_target, split_targets
from gpipe_bench.engine.runtime.reduction import Reduction, reduced


class Goal(NamedTuple):
    """The arguments of a step that only that process uses."""

    target: Any
    loss: Any
    return_output: bool
    reduction: Reduction

    def shared(self, chunks: int, sizes: Sequence[int], *, learning: bool) -> tuple[list[Any], Any, Sequence[float]]:
        """The targets of the micro-batches, the function that gives their losses, and the share of each."""
        if not callable(self.loss):
            rule = "loss must be a function of (output, target) in the process with the last partition"
            raise TypeError(f"{rule}, got {self.loss!r:.60}; pass one, such as mse_loss")
        if learning:
            check_target(self.target)
        targets = split_targets(self.target, chunks, sizes)
        return targets, *reduced(self.loss, self.reduction, self.target, targets, sizes)
