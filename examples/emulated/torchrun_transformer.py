"""A language model cut into two stages, by hand or by tracing, as scripts for ``torchrun`` do; trained for three steps.

On GPUs: ``torchrun --nproc-per-node 2 torchrun_transformer.py``.
Without: ``gpipe-bench emulate --nproc 2 torchrun_transformer.py``.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, SplitPoint, pipeline

WORDS, WIDTH, HEADS, LAYERS, LENGTH, BATCH, CHUNKS = 10_000, 512, 8, 8, 256, 64, 4


class Decoder(nn.Module):
    """Embeddings, layers and a head; a stage is one that lacks some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words: nn.Embedding | None = nn.Embedding(WORDS, WIDTH)
        layers = {
            str(i): nn.TransformerDecoderLayer(WIDTH, HEADS, dropout=0.0, batch_first=True) for i in range(LAYERS)
        }
        self.layers = nn.ModuleDict(layers)
        self.norm: nn.LayerNorm | None = nn.LayerNorm(WIDTH)
        self.head: nn.Linear | None = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """The output of this stage, of tokens of shape (samples, length) or of the output of the stage before."""
        x = tokens if self.words is None else self.words(tokens)
        for layer in self.layers.values():
            x = layer(x, x)
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x)


def by_hand(rank: int, device: torch.device) -> PipelineStage:
    """A stage that keeps half of the layers."""
    model = Decoder()
    for i in range(LAYERS):
        if (i < LAYERS // 2) != (rank == 0):
            del model.layers[str(i)]
    if rank == 0:
        model.norm = model.head = None
    else:
        model.words = None
    return PipelineStage(model.to(device), rank, 2, device)


def traced(rank: int, device: torch.device) -> PipelineStage:
    """A stage that PyTorch cuts out of the whole model."""
    sample = torch.ones(BATCH // CHUNKS, LENGTH, dtype=torch.long)
    pipe = pipeline(Decoder(), (sample,), split_spec={f"layers.{LAYERS // 2}": SplitPoint.BEGINNING})
    return pipe.build_stage(rank, device)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of all tokens."""
    return nn.functional.cross_entropy(logits.reshape(-1, WORDS), targets.reshape(-1))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--traced", action="store_true", help="let PyTorch cut the model")
    given = parser.parse_args()
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    stage = (traced if given.traced else by_hand)(rank, device)
    schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage.submod.parameters())
    tokens = torch.ones(BATCH, LENGTH, dtype=torch.long, device=device)
    targets = torch.randint(WORDS, (BATCH, LENGTH), device=device)
    for _ in range(3):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens)
        else:
            losses: list[Tensor] = []
            schedule.step(target=targets, losses=losses)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
