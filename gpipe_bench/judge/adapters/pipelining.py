"""torch.distributed.pipelining: a process per device over gloo, with skips, checkpoints and shares of a user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from gpipe_bench.judge.pipes import StagePipe, at_two_a_device, by_hand
from gpipe_bench.judge.protocol import Setup

NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "looped_bfs": "LoopedBFS",
         "interleaved_zb": "InterleavedZeroBubble", "zb_v": "ZBVZeroBubble", "dualpipe_v": "DualPipeV"}  # fmt: skip


class Pipelining:
    """A schedule, by this project's name for it."""

    version, processes = torch.__version__, True

    def __init__(self, schedule: str) -> None:
        self.schedule, self.per_device = schedule, 1 if schedule in {"gpipe", "1f1b"} else 2
        self.kind: Any = getattr(pipelining, f"Schedule{NAMES[schedule]}")
        self.fitted = at_two_a_device if self.schedule == "dualpipe_v" else lambda setup: setup
        self.limits = by_hand(schedule) | {
            "uneven": "pytorch#126600: one shape for all micro-batches", "clip": "pytorch#162638: left to the user",
            "none": "pytorch#130055: tensors only", "replicas": "left to the user: DDP or FSDP",
        } | ({"few": "refused: as many micro-batches as stages"} if self.schedule != "gpipe" else {})  # fmt: skip

    def build(self, model: nn.Sequential, setup: Setup) -> StagePipe:
        """The stages of this rank."""
        pipe = _Pipe(model, setup, v_shaped=self.schedule in {"zb_v", "dualpipe_v"})
        pipe.kind, pipe.averages = self.kind, setup.defaults
        return pipe


class _Pipe(StagePipe):
    def run(self, call: str, inputs: tuple[Tensor, ...], loss: Any, target: Any, losses: list[Tensor]) -> Any:
        self.loss, shapes = loss, tuple(value.shape for value in inputs)
        if shapes not in self.plans:  # stages know shapes from their first step; scaling: torchtitan#1733
            here, n, group = torch.device(self.device), len(self.whole), self.group
            made: Any = [pipelining.PipelineStage(own, j, n, here, group=group) for j, own in self.stages.items()]
            made = made if len(made) > 1 else made[0]
            self.plans[shapes] = self.kind(made, self.setup.chunks, loss_fn=self.now, scale_grads=self.averages)
        last = {"return_outputs": call == "eval"} | ({"target": target, "losses": losses} if self.is_last else {})
        return getattr(self.plans[shapes], call)(*inputs if 0 in self.stages else (), **last)

    def train(self, inputs: tuple[Tensor, ...], target: Any, loss: Any) -> list[Tensor]:
        self.run("step", inputs, loss, target, losses := list[Tensor]())
        return losses

    def infer(self, inputs: tuple[Tensor, ...]) -> Any:
        return self.run("eval", inputs, lambda out, _: out, inputs[0], [])


def adapter(schedule: str = "") -> Pipelining:
    """The adapter."""
    return Pipelining(schedule or "1f1b")
