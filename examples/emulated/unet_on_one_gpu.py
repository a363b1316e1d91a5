"""A variant of the ablation on the one GPU that four partitions share: a real one, or a virtual one.

python examples/emulated/unet_on_one_gpu.py dep-str-ptl
gpipe-bench emulate examples/emulated/unet_on_one_gpu.py --devices 1 --profile h100 -- dep-str-ptl
"""

import sys

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from gpipe_bench import Components, GPipe
from gpipe_bench.models import MODELS

gpu = torch.device(torch.accelerator.current_accelerator().type, 0)
torch.manual_seed(0)
pipe = GPipe(
    MODELS["unet"].build(depth=5, B=5, C=64),
    balance=[34, 76, 70, 61],
    devices=[gpu] * 4,
    chunks=8,
    checkpoint="except_last",
    components=Components.from_label(sys.argv[1]),
    transfer="host",
)
images, masks = torch.rand(128, 3, 192, 192).to(gpu), torch.ones(128, 1, 192, 192).to(gpu)

for _ in range(3):
    pipe.zero_grad()
    binary_cross_entropy_with_logits(pipe(images), masks).backward()
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
