"""d9d: a process per device over gloo. Its buffers and its context are those of GPUs; both are given CPUs here."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from gpipe_bench.judge.pipes import SPLIT, PackPipe, at_two_a_device, by_hand
from gpipe_bench.judge.protocol import Setup

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpipe": ("GPipe", {}), "zb_v": ("ZeroBubbleV", {}), "dualpipe_v": ("DualPipeV", {}),
    "1f1b": ("1F1B", {"num_stages_per_rank": 1, "zero_bubble": False}),
    "zb_h1": ("1F1B", {"num_stages_per_rank": 1, "zero_bubble": True}),
    "interleaved": ("1F1B", {"num_stages_per_rank": 2, "zero_bubble": False}),
    "interleaved_zb": ("1F1B", {"num_stages_per_rank": 2, "zero_bubble": True}),
    "looped_bfs": ("LoopedBFS", {"num_stages_per_rank": 2}),
}  # fmt: skip


class D9d:
    """A schedule, by this project's name for it."""

    processes = True

    def __init__(self, schedule: str) -> None:
        if torch.__version__ < TorchVersion("2.14"):
            raise ImportError(f"d9d needs PyTorch 2.14 or newer, got {torch.__version__}")
        self.version, (kind, options), self.v_shaped = version("d9d"), PLANS[schedule], schedule.endswith("_v")
        config = import_module("d9d.pipelining.factory.config")
        self.plans = [
            getattr(config, f"PipelineSchedule{kind}Config")(**options),
            config.PipelineScheduleInferenceConfig(),
        ]
        self.per_device = options.get("num_stages_per_rank", 2 if self.v_shaped else 1)
        self.fitted = at_two_a_device if schedule == "dualpipe_v" else lambda setup: setup
        few = {"few": "its docs: two micro-batches per device at least"} if schedule == "dualpipe_v" else {}
        one = {"evaluate": "its schedule for inference has one stage per device"} if self.per_device == 2 else {}
        split = dict.fromkeys(("main_grad", "backward order"), "its docs: runs in I and W") if schedule in SPLIT else {}
        self.limits = by_hand(schedule) | few | one | split | {
            "tuples": "refused: every tensor between stages must have a gradient",
            "norm to the bit": "its docs: a sum of squares over processes", "replicas": "left to its trainer",
        }  # fmt: skip

    def build(self, model: nn.Sequential, setup: Setup) -> PackPipe:
        """The stages of this rank."""
        return PackPipe(model, setup, self.plans, v_shaped=self.v_shaped)


def adapter(schedule: str = "") -> D9d:
    """The adapter."""
    return D9d(schedule or "1f1b")
