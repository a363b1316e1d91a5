"""Host time of I and W, the two halves of B: ``python -m scripts.split_speed [--blocks 4 96] [--repeats 40]``.

Partitions of small blocks (a linear layer and a ReLU, 8 rows of 4 features), whose arithmetic hardly counts. B, I and W
are those of one cell of the runtime. The steps are whole ones of ``zb_h1`` and ``1f1b``: 2 partitions, 4 micro-batches,
no checkpoints, one thread. All of them take turns. The table has the median of CPU milliseconds, the quartiles, and
ratios of medians. Times and spreads differ from machine to machine; ratios hardly do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median, quantiles
from time import process_time
from typing import Any, Final

import torch
from torch import nn

from gpipe_bench import GPipe
from gpipe_bench.autograd.microbatch import Values
from gpipe_bench.engine.runtime.cell import Cell

_BLOCKS: Final = (4, 8, 16, 32, 64, 96)
_HEAD: Final = """\
| blocks | B, ms | I, ms | W, ms | (I + W) / B | step of `1f1b`, ms | step of `zb_h1`, ms | `zb_h1` / `1f1b` |
|--:|--:|--:|--:|--:|--:|--:|--:|
"""


class _Layers:
    """Stands for the computation of a cell: runs layers, without random numbers, streams or an observer."""

    stream = None

    def __init__(self, layers: nn.Module) -> None:
        self._layers = layers

    def forward(self, flat: Values, *, around: Callable[..., Values]) -> Values:
        return around(lambda values: (self._layers(*values),), flat)

    def observed(self, _: str, job: Callable[..., Any], *args: Any) -> Any:
        return job(*args)


def _layers(blocks: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(blocks)))


def _backward(task: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """B of one cell, and I and W of another one."""
    for splits in (False, True):
        cell = Cell(task, checkpointed=False, splits=splits)
        (output,) = cell.forward((torch.rand(8, 4, requires_grad=True),))
        way = cell.backward_inputs if splits else cell.backward
        yield "I" if splits else "B", partial(way, [torch.ones_like(output)])
        if splits:
            yield "W", cell.backward_weights


def _step(blocks: int, schedule: str) -> Callable[[], Any]:
    options: Any = {"devices": ["cpu"] * 2, "chunks": 4, "checkpoint": "never", "workers": "never"}
    pipe = GPipe(_layers(2 * blocks), [blocks] * 2, schedule=schedule, **options)
    return partial(pipe.step, torch.rand(32, 4), torch.rand(32, 4), nn.functional.mse_loss)


def _row(blocks: int, repeats: int) -> str:
    task = _Layers(_layers(blocks))
    steps = {name: _step(blocks, name) for name in ("1f1b", "zb_h1")}
    found: dict[str, list[float]] = {name: [] for name in ("B", "I", "W", *steps)}
    # The first turn makes the gradients that the others add to.
    for turn in range(1 + repeats):
        for name, action in (*_backward(task), *steps.items()):
            before = process_time()
            action()
            if turn:
                found[name].append((process_time() - before) * 1e3)
    middle = {name: median(times) for name, times in found.items()}
    shown = {}
    for name, times in found.items():
        first, _, third = quantiles(times, n=4, method="inclusive")
        shown[name] = f"{middle[name]:.2f} ({first:.2f} to {third:.2f})"
    halves = f"{(middle['I'] + middle['W']) / middle['B']:.2f}"
    ratio = f"{middle['zb_h1'] / middle['1f1b']:.2f}"
    cells = [shown["B"], shown["I"], shown["W"], halves, shown["1f1b"], shown["zb_h1"], ratio]
    return f"| {blocks} | {' | '.join(cells)} |\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table.

    Args:
        arguments: of the command line; those of the process by default.
    """
    parser = argparse.ArgumentParser(prog="python -m scripts.split_speed", description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=_BLOCKS, help="how many blocks a partition has")
    parser.add_argument("--repeats", type=int, default=40, help="how often each is timed, two times or more")
    chosen = parser.parse_args(arguments)
    if chosen.repeats < 2 or min(chosen.blocks) < 1:
        parser.error("--repeats must be 2 or more, --blocks 1 or more")
    torch.set_num_threads(1)
    print(_HEAD, end="")
    for blocks in chosen.blocks:
        print(_row(blocks, chosen.repeats), end="", flush=True)


if __name__ == "__main__":
    main()
