"""Two devices, a copy stream, and a missing wait: `gpipe-bench emulate` finds the race that no test on one GPU shows.

gpipe-bench emulate examples/emulated/planted_race.py --devices 2 --races
gpipe-bench emulate examples/emulated/planted_race.py --devices 2 --races -- --mended
"""

import sys

import torch
from torch import nn

MENDED = "--mended" in sys.argv
kind = torch.accelerator.current_accelerator().type
first, second = torch.device(kind, 0), torch.device(kind, 1)

front = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()).to(first)
back = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1)).to(second)
optimizer = torch.optim.SGD([*front.parameters(), *back.parameters()], lr=0.1)
batch = torch.rand(512, 4096).to(first)
copies = torch.Stream(first)  # copies overlap with the next computation of the first device

for _ in range(4):
    optimizer.zero_grad()
    hidden = front(batch)
    if MENDED:
        copies.wait_stream(torch.accelerator.current_stream(first))
    with copies:  # without the wait above, the copy may begin before `hidden` is there
        moved = hidden.to(second, non_blocking=True)
    hidden.record_stream(copies)
    loss = back(moved).square().mean()
    loss.backward()
    optimizer.step()
