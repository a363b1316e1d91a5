"""A pipeline: partitions in place, and the executor that runs batches through them, which is chosen once.

The paper's executor follows torchgpipe (Kim et al., arXiv 2004.09910), which brought GPipe (Huang et al., arXiv
1811.06965) to PyTorch. The runtime runs any schedule. How a batch is cut into micro-batches, how their results are put
together and where layers are is up to the modules that hold a pipeline: :class:`gpipe_bench.engine.gpipe.GPipe`,
:class:`gpipe_bench.engine.pipe.Pipe` and :class:`gpipe_bench.distributed.Pipe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gpipe_bench.autograd.microbatch import MicroBatch
from gpipe_bench.engine.batch import Batch, Gather, SeenLayers
from gpipe_bench.engine.module import PartitionedModule
from gpipe_bench.engine.partition import Partition, put_in_place
from gpipe_bench.engine.replicas import active_replica, check_no_replica
from gpipe_bench.engine.runtime.loss import Goal
from gpipe_bench.schedules.program import Plan
from gpipe_bench.skip.namespace import SkipKey


class Executor(Protocol):
    """Runs batches: :class:`gpipe_bench.engine.paper.executor.PaperExecutor`, or the runtime's."""

    def forward(self, batch: Batch) -> Any:
        """What the last layer gives, with a graph where the plan of the batch has a backward pass."""

    def step(self, batch: Batch, goal: Goal) -> tuple[Tensor, Any]:
        """Run forward and backward: the loss of the batch, and its output if the goal asks for it; without a graph."""


class Pipeline:
    """Runs batches through a module, which holds it and is told with each call: so it is free as soon as dropped.

    Args:
        executor: what runs the batches.
        rows: for each partition the device of the schedule that it belongs to.
    """

    def __init__(self, executor: Executor, rows: tuple[int, ...]) -> None:
        self.executor, self.rows = executor, rows
        self.reset_process_state()

    def reset_process_state(self) -> None:
        """Forget everything that was seen of layers, and that belongs to this process and cannot be copied."""
        self._seen = SeenLayers()
        self._in_place: tuple[Any, list[Partition]] = None, []

    def __getstate__(self) -> dict[str, Any]:
        return {"executor": self.executor, "rows": self.rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # of this class alone

    def plan(self, module: PartitionedModule, m: int) -> Plan[SkipKey]:
        """What a batch of m micro-batches is to do, by the settings and modes of now."""
        if self._in_place[0] is not module.partitions:
            self.reset_process_state()
            options: Any = {"portals": module.components.portals, "transfer": module.transfer}
            found = put_in_place(module.partitions, module.devices, self.rows, module.skip_layout, **options)
            self._in_place = module.partitions, found
        return Plan(
            m=m,
            n=len(module.partitions),
            components=module.components,
            checkpoint=module.checkpoint if module.training else "never",
            arrivals={each.j: each.incoming for each in self._in_place[1]},
            backward=torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
        )

    def batch(
        self, module: PartitionedModule, microbatches: list[MicroBatch], sizes: Sequence[int], gather: Gather
    ) -> Batch:
        """A batch of micro-batches of these sizes, ready for the executor; see :class:`Batch`."""
        plan = self.plan(module, len(sizes))
        return Batch(module, self._in_place[1], self._seen, plan, microbatches, sizes, gather)

    def step(
        self,
        module: PartitionedModule,
        microbatches: list[MicroBatch],
        sizes: Sequence[int],
        goal: Goal,
        gather: Gather,
    ) -> Any:
        """A training step: the loss of the batch, and its output if asked for. Empties ``microbatches``."""
        if not module.partitions:
            raise ValueError("pipe must have a layer to train, got an empty nn.Sequential; add layers")
        if torch.is_grad_enabled() and (replica := active_replica()) is not None:
            check_no_replica(replica, module)
        loss, output = self.executor.step(self.batch(module, microbatches, sizes, gather), goal)
        return (loss, output) if goal.return_output else loss
