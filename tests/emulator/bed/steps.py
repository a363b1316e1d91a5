"""A training step of every registered model on a virtual device: what it allocates, which kernels run, what it gives.

python -m tests.emulator.bed.steps        of devices that compute, as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from gpipe_bench.emulator.library import leave, load
from gpipe_bench.emulator.recording import recording
from gpipe_bench.models.table import MODELS

__all__ = ["SMALL", "step"]

DEVICE = "virtual:1"
_DECODER = {"L": 2, "D": 8, "heads": 2, "kv": 1, "hidden": 12, "vocabulary": 11, "context": 6}
SMALL: dict[str, dict[str, Any]] = {
    "unet": {"depth": 2, "B": 1, "C": 4, "size": 16},
    "amoebanet-d": {"L": 3, "D": 8, "size": 64, "classes": 5},
    "vit": {"L": 2, "D": 8, "heads": 2, "size": 8, "patch": 4, "classes": 5},
    **{
        name: {"L": 2, "D": 8, "heads": 2, "vocabulary": 11, "context": 6}
        for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    },
    **dict.fromkeys(("decoder", "hyper-connections", "experts"), _DECODER),
    "attention-residuals": {**_DECODER, "block": 1},
    # Module.to() makes a parameter of its own of each use of a tied one, as for all devices that are no CUDA.
    "multi-token": {**_DECODER, "tied": False},
    "captions": {**_DECODER, "V": 1, "width": 8, "vheads": 2, "size": 8, "patch": 4},
    # Of the models of libraries, one with convolutions and one with attention.
    "torchvision/resnet18": {"size": 64, "classes": 5},
    "timm/vit_tiny_patch16_224": {"classes": 5},
}


def step(name: str) -> dict[str, Any]:
    """Names of kernels and bytes of allocations in order; shapes and strides of the output and of all gradients."""
    spec = MODELS[name]
    arguments = {**{key: argument.default for key, argument in spec.arguments.items()}, **SMALL[name]}
    model = spec.network(arguments).to(DEVICE)
    x, target = (tensor.to(DEVICE) for tensor in spec.make_batch(2, arguments, torch.Generator().manual_seed(1)))
    with recording() as trace:
        output = model(x)
        spec.loss(output, target).backward()
    outputs = output if isinstance(output, tuple) else (output,)
    given = [*outputs, *(parameter.grad for parameter in model.parameters())]
    return {
        "kernels": [record.name for record in trace.of("kernel")],
        "allocations": [record.nbytes for record in trace.of("alloc")],
        "given": [[list(tensor.shape), list(tensor.stride()), str(tensor.dtype)] for tensor in given],
    }


def main() -> None:
    """Print the steps of all models on devices that compute."""
    load(2)
    torch.set_num_threads(1)
    json.dump({name: step(name) for name in SMALL}, sys.stdout)
    leave(0)


if __name__ == "__main__":
    main()
