"""Pipeline parallelism on one page: a reference that runs any schedule, with skips and checkpoints, in one thread.

A model is cut into n *stages* of neighbouring layers, and a batch into m *micro-batches*. Each *device* holds one or
more stages and works through a list of actions. A schedule (:mod:`gpipe_bench.schedules`) is one list per device:

    F(i, j)   forward pass of micro-batch i on stage j: receive the inputs, run the layers, send the outputs
    B(i, j)   backward pass: I, then W
    I(i, j)   receive the gradients of the outputs, compute all gradients, send those of the inputs
    W(i, j)   add the gradients of the weights to ``.grad``

                 clock-cycle   1        2        3        4        5        6
    GPipe, m=2      device 0   F(0,0)   F(1,0)                     B(1,0)   B(0,0)
           n=2      device 1            F(0,1)   F(1,1)   B(1,1)   B(0,1)

*A cell has a graph of its own.* Cell (i, j) begins at copies of its inputs and ends at its outputs, which travel on
without their graph. So its backward pass can run at any time, once the gradients of its outputs have arrived.

*A checkpoint is a cell that forgets its graph.* Before I it runs its layers again, with the random numbers and the
buffers that its forward pass found. Between F and I it keeps its inputs alone.

*Everything travels as a message*: values, skips, and the gradients of both. A device waits for the messages that its
next action needs. A skip goes straight from the stage that stashes it to each stage that reads it, past those between.
Papers: GPipe (arXiv 1811.06965), torchgpipe, which has skips (2004.09910), 1F1B (1806.03377), I and W (2401.10241).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gpipe_bench.schedules import Action, named_schedule
from gpipe_bench.schedules.table import device_count
from gpipe_bench.skip import Skippable
from gpipe_bench.skip.namespace import SkipKey
from gpipe_bench.skip.tracker import LocalTracker, use_tracker

State = tuple[Tensor, list[tuple[nn.Module, str, Tensor]]]
Message = tuple[Any, ...]
"""Its name: what it is, the micro-batch and the stage that receives it; of a skip also the key and the reader."""


class Stuck(RuntimeError):  # noqa: N818 - says what has happened, as StopIteration does
    """Every device waits for a message that no device has sent."""


class Stage(nn.Sequential):
    """Neighbouring layers."""

    takes: list[SkipKey]  # the skips that they read of earlier stages
    gives: list[tuple[SkipKey, int]]  # the skips that later stages read, each with one of these stages

    def forward(self, inputs: Sequence[Any]) -> list[Any]:
        """From the values that enter, then skips, to the values that leave, then skips."""
        count = len(inputs) - len(self.takes)
        tracker = LocalTracker(zip(self.takes, inputs[count:], strict=True))
        x = packed(inputs[:count])
        with use_tracker(tracker):
            for layer in self:
                x = layer(x)
        return [*flat(x), *(tracker.values[key] for key, _ in self.gives)]


class Cell:
    """Micro-batch i on stage j, from its forward to its backward pass."""

    def __init__(self, stage: Stage, inputs: Sequence[Any], *, checkpoint: bool) -> None:
        self.stage, self.inputs, self.checkpoint = stage, inputs, checkpoint
        self.leaves: list[Any] = []  # the inputs as its graph sees them
        self.outputs: list[Any] = []  # the ends of its graph
        self.weights: list[tuple[nn.Parameter, Tensor]] = []  # with their gradients, from I to W

    def forward(self) -> list[Any]:
        """F: the outputs, without their graph."""
        if self.checkpoint:
            self.found = state_of(self.stage, copies=True)
        outputs = self.run()
        if self.checkpoint:
            self.leaves, self.outputs = [], []
        return [detached(output) for output in outputs]

    def run(self) -> list[Any]:
        """Run the layers, and keep both ends of their graph."""
        self.leaves = [detached(value) for value in self.inputs]
        # A layer may write to its input. Autograd allows nobody to write to a leaf, whose memory is also the sender's.
        self.outputs = self.stage([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves])
        return self.outputs

    def recompute(self) -> None:
        """Make the graph of a checkpoint, as the forward pass did."""
        now = state_of(self.stage, copies=False)
        put_back(self.found)
        self.run()
        put_back(now)

    def backward_inputs(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """I: from the gradients of the outputs to those of the inputs. Those of the weights are kept for W."""
        if self.checkpoint:
            self.recompute()
        pairs = [(end, grad) for end, grad in zip(self.outputs, grads, strict=True) if grad is not None]
        # A tensor may leave in several places. As in the plain module, the gradient of its last reader comes first.
        pairs = [(end, grad) for end, grad in reversed(pairs) if end.requires_grad]
        weights = [weight for weight in self.stage.parameters() if weight.requires_grad]
        starts = [leaf for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.requires_grad] + weights
        grad_of: dict[int, Tensor | None] = {}
        if pairs and starts:
            ends, given = zip(*pairs, strict=True)
            # One call for inputs and weights: a backward function of the user may have side effects, and runs once.
            found = torch.autograd.grad(ends, starts, given, allow_unused=True)
            grad_of = dict(zip(map(id, starts), found, strict=True))
        self.weights = [(weight, grad) for weight in weights if (grad := grad_of.get(id(weight))) is not None]
        return [grad_of.get(id(leaf)) for leaf in self.leaves]

    def backward_weights(self) -> None:
        """W: add the gradients in place, and call the hooks that follow, as ``loss.backward()`` does."""
        for weight, grad in self.weights:
            accumulate: Any = get_gradient_edge(weight).node
            with torch.no_grad():
                accumulate(grad)


class Pipeline:
    """Trains a model by a schedule.

    Args:
        model: its layers. Each takes and gives a tensor, or a tuple of two or more values; each may be skippable.
        balance: how many layers each stage has.
        chunks: into how many micro-batches a batch is cut.
        checkpoint: ``always``, ``except_last`` (the last micro-batch keeps its graph) or ``never``.
        schedule: one of :data:`gpipe_bench.schedules.SCHEDULES`.
    """

    cell_type: ClassVar[type[Cell]] = Cell
    sent_type: ClassVar[type[dict[Message, Any]]] = dict

    def __init__(self, model: nn.Sequential, balance: list[int], chunks: int, checkpoint: str, schedule: str) -> None:
        layers = iter(model)
        self.model, self.chunks, self.checkpoint, self.schedule = model, chunks, checkpoint, schedule
        self.stages = [Stage(*islice(layers, count)) for count in balance]
        self.n = len(self.stages)
        self.origin = connect(self.stages)

    def step(self, x: Any, target: Any, loss: Callable[[Any, Any], Tensor], reduction: Any = "mean") -> Tensor:
        """The loss of a batch, whose gradients are added to ``.grad``.

        ``loss`` gets output and target of a micro-batch. ``reduction`` is ``mean`` (over samples), ``sum``, or a
        function of a target, whose result is the count that the loss is a mean of.
        """
        self.start(x, target, loss, reduction)
        self.carry_out(self.lists)
        return torch.stack(self.losses).sum()

    def evaluate(self, x: Any) -> Any:
        """The output for a batch. No graph is made."""
        self.start(x, None, None, "sum")
        with torch.no_grad():
            self.carry_out([[action for action in row if action.kind == "F"] for row in self.lists])
        return packed([torch.cat(parts) for parts in zip(*(self.outputs[i] for i in range(self.m)), strict=True)])

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients of all stages by their norm, which is returned."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def start(self, x: Any, target: Any, loss: Any, reduction: Any) -> None:
        """Cut a batch into micro-batches, and send these to the first stage."""
        parts, self.loss, self.sent = cut(x, self.chunks), loss, self.sent_type()
        self.m = len(parts)
        self.lists = named_schedule(self.schedule, self.m, self.n, device_count(self.schedule, self.n)).devices
        self.targets = [None] * self.m if target is None else [packed(each) for each in cut(target, self.chunks)]
        self.shares = self.shares_of(parts, reduction)
        self.cells: dict[tuple[int, int], Cell] = {}
        self.losses, self.outputs = list[Tensor](), dict[int, list[Any]]()
        for i, values in enumerate(parts):
            self.sent[("values", i, 0)] = values

    def shares_of(self, parts: Sequence[list[Any]], reduction: Any) -> list[float]:
        """By what the loss of each micro-batch is multiplied, so that the products add up to the loss of the batch."""
        if reduction == "sum":
            return [1.0] * self.m
        counts = [len(part[0]) for part in parts] if reduction == "mean" else [*map(reduction, self.targets)]
        return [count / sum(counts) for count in counts]

    def carry_out(self, lists: Sequence[Sequence[Action]]) -> None:
        """In each clock-cycle every device takes its next action, if the messages for it are there."""
        devices = [deque(row) for row in lists]
        while any(devices):
            able = [row for row in devices if row and self.ready(row[0])]
            if not able:
                raise Stuck("; ".join(f"{row[0]} waits" for row in devices if row))
            for row in able:
                self.do(row.popleft())

    def ready(self, action: Action) -> bool:
        """Whether all messages for an action have been sent."""
        return all(name in self.sent for name in self.awaited(action))

    def awaited(self, action: Action) -> list[Message]:
        """The messages that an action receives."""
        kind, i, j = action
        if kind == "F":
            return [("values", i, j), *[("skip", i, j, key, j) for key in self.stages[j].takes]]
        if kind in "BI":
            return [("gradients", i, j), *[("skip gradient", i, j, key, to) for key, to in self.stages[j].gives]]
        return []

    def do(self, action: Action) -> None:
        """Receive what an action needs, and carry it out."""
        kind, i, j = action
        received = [self.sent.pop(name) for name in self.awaited(action)]
        values = [*received[0], *received[1:]] if received else []
        if kind == "F":
            self.forward(i, j, values)
        if kind in "BI":
            self.backward_inputs(i, j, values)
        if kind in "BW":
            self.cells.pop((i, j)).backward_weights()

    def forward(self, i: int, j: int, inputs: list[Any]) -> None:
        """F: run a new cell, and send its outputs."""
        checkpointed = self.checkpoint == "always" or (self.checkpoint == "except_last" and i < self.m - 1)
        cell = self.cell_type(self.stages[j], inputs, checkpoint=checkpointed and self.loss is not None)
        outputs = cell.forward()
        if self.loss is not None:
            self.cells[i, j] = cell
        for key, reader in reversed(self.stages[j].gives):
            self.sent[("skip", i, reader, key, reader)] = outputs.pop()
        if j < self.n - 1:
            self.sent[("values", i, j + 1)] = outputs
        else:
            self.end(i, outputs)

    def end(self, i: int, outputs: list[Any]) -> None:
        """The loss of a micro-batch has a graph of its own, too. Its gradients are a message to the last stage."""
        if self.loss is None:
            self.outputs[i] = outputs
        # A micro-batch that counts nothing has no loss: the mean of nothing is 0 / 0.
        elif self.shares[i]:
            loss = self.loss(packed(outputs), self.targets[i]) * self.shares[i]
            if loss.requires_grad:
                loss.backward()
            self.losses.append(loss.detach())
        self.sent[("gradients", i, self.n - 1)] = [getattr(value, "grad", None) for value in outputs]

    def backward_inputs(self, i: int, j: int, grads: list[Tensor | None]) -> None:
        """I: send the gradients of the inputs to where these came from."""
        found = self.cells[i, j].backward_inputs(grads)
        for key in reversed(self.stages[j].takes):
            self.sent[("skip gradient", i, self.origin[key], key, j)] = found.pop()
        if j > 0:
            self.sent[("gradients", i, j - 1)] = found


def connect(stages: Sequence[Stage]) -> dict[SkipKey, int]:
    """Tell each stage which skips it takes and gives; returns the stage in which each skip begins."""
    skippable = [[layer for layer in stage.modules() if isinstance(layer, Skippable)] for stage in stages]
    origin = {key: j for j, layers in enumerate(skippable) for layer in layers for key in layer.stashes()}
    for j, layers in enumerate(skippable):
        read = dict.fromkeys(key for layer in layers for key in (*layer.pops(), *layer.peeks()))
        stages[j].takes, stages[j].gives = [key for key in read if origin[key] != j], []
        for key in stages[j].takes:
            stages[origin[key]].gives.append((key, j))
    return origin


def state_of(stage: Stage, *, copies: bool) -> State:
    """What a forward pass finds and may change: the generator of random numbers, and the buffers of its layers."""
    buffers = [(module, *pair) for module in stage.modules() for pair in module.named_buffers(recurse=False)]
    return torch.get_rng_state(), [(module, name, b.clone() if copies else b) for module, name, b in buffers]


def put_back(state: State) -> None:
    """Make it the state of now."""
    torch.set_rng_state(state[0])
    for module, name, buffer in state[1]:
        setattr(module, name, buffer)


def flat(x: Any) -> list[Any]:
    """What a layer takes or gives, as a list."""
    return list(x) if isinstance(x, tuple) else [x]


def packed(values: Sequence[Any]) -> Any:
    """The opposite: a single value, or a tuple."""
    return values[0] if len(values) == 1 else tuple(values)


def cut(x: Any, chunks: int) -> list[list[Any]]:
    """A batch as micro-batches. The last may have fewer rows; a small batch has fewer micro-batches."""
    return [list(part) for part in zip(*(value.chunk(chunks) for value in flat(x)), strict=True)]


def detached(value: Any) -> Any:
    """A leaf of a new graph, with the same memory and the same need for a gradient."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
