"""torch.distributed.pipelining: a process per device over gloo, with skips, checkpoints and shares of a user's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from gpipe_bench.judge.protocol import Loss, Setup
from gpipe_bench.judge.skips import Stage, make_stages

NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "looped_bfs": "LoopedBFS",
         "interleaved_zb": "InterleavedZeroBubble", "zb_v": "ZBVZeroBubble", "dualpipe_v": "DualPipeV"}  # fmt: skip
_TENSORS = "pytorch#130055: tensors only"


class Pipelining:
    """A schedule, by this project's name for it."""

    version, processes = torch.__version__, True

    def __init__(self, schedule: str) -> None:
        self.schedule = schedule or "1f1b"
        self.kind: Any = getattr(pipelining, f"Schedule{NAMES[self.schedule]}")
        self.per_device = 1 if self.schedule in {"gpipe", "1f1b"} else 2
        self.limits = {
            "uneven": "pytorch#126600: one shape for all micro-batches", "clip": "pytorch#162638: left to the user",
            "tied": "left to the user", "none": _TENSORS, "replicas": "left to the user: DDP or FSDP",
            "recovery": "the group cannot go on after an error",
        }  # fmt: skip
        if self.schedule != "gpipe":
            self.limits["few"] = "refused: at least as many micro-batches as stages"

    def build(self, model: nn.Sequential, setup: Setup) -> _Pipe:
        """The stages of this rank."""
        # Stages run once more before their first step, to find shapes.
        recompute = {"never": 0, "except_last": setup.chunks - 1, "always": 10**9}[setup.checkpoint]
        stages = make_stages(model, setup.balance(len(model)), recompute, sent=True)
        rank, n = dist.get_rank(), setup.n
        v_shaped = self.schedule in {"zb_v", "dualpipe_v"}
        places = {rank, 2 * n - 1 - rank if v_shaped else n + rank} if self.per_device == 2 else {rank}
        device = setup.places[rank]
        return _Pipe({j: stages[j].to(device) for j in sorted(places)}, device, len(stages), self.kind, setup)


class _Pipe:
    def __init__(self, stages: dict[int, Stage], device: str, n: int, kind: Any, setup: Setup) -> None:
        self.stages, self.device, self.n, self.kind, self.setup = stages, torch.device(device), n, kind, setup
        self.plan: Any = None
        self.loss: Any = None
        self.shapes: Any = None

    def own(self) -> list[nn.Module]:
        return [*self.stages.values()]

    def run(self, call: str, x: Any, loss: Loss | None, target: Any = None) -> tuple[Any, list[Tensor]]:
        given, losses = x if isinstance(x, tuple) else (x,), list[Tensor]()
        self.loss = loss.call if loss else lambda out, _: out
        if loss and not self.setup.defaults:
            share = loss.shares(target, self.setup.chunks)
            self.loss = lambda out, part: loss.call(out, part) * share(part)
        for stage in self.stages.values():
            stage.calls = 0
        if self.shapes != (shapes := [value.shape for value in given]):  # stages know shapes from their first step
            pieces: Any = [pipelining.PipelineStage(each, j, self.n, self.device) for j, each in self.stages.items()]
            options = {} if self.setup.defaults else {"scale_grads": False}  # torchtitan#1733
            pieces = pieces if len(pieces) > 1 else pieces[0]
            self.plan = self.kind(pieces, self.setup.chunks, loss_fn=lambda o, t: self.loss(o, t), **options)  # noqa: PLW0108 - the loss changes
            self.shapes = shapes
        ends = {"target": target, "losses": losses} if self.n - 1 in self.stages else {}
        return getattr(self.plan, call)(*given if 0 in self.stages else (), return_outputs=loss is None, **ends), losses

    def step(self, x: Any, target: Any, loss: Loss) -> Tensor | None:
        losses = self.run("step", x, loss, target)[1]
        mean = self.setup.defaults and loss.reduction == "mean"
        return (torch.stack(losses).mean() if mean else torch.stack(losses).sum()).detach() if losses else None

    def evaluate(self, x: Any) -> Any:
        with torch.no_grad():
            return self.run("eval", x, None, x if self.n - 1 in self.stages else None)[0]

    def clip(self, max_norm: float) -> Tensor:
        raise RuntimeError(f"PyTorch leaves clipping to {max_norm} to the user")


def adapter(schedule: str = "") -> Pipelining:
    """The adapter."""
    return Pipelining(schedule)
