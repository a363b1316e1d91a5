"""All behaviours by name, as a table. Cases of each come smallest first: the first that fails is the reproduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gpipe_bench.judge import layers as own
from gpipe_bench.judge import scripts
from gpipe_bench.judge.layers import Block, popping, stashing
from gpipe_bench.judge.protocol import Behaviour, Case, Session, Setup

GRID = (Setup(2, 2), Setup(3, 4), Setup(2, 2, "always"), Setup(3, 4, "always"), Setup(3, 4, "except_last"))
SMALL = (Setup(2, 2), Setup(3, 4, "always"))

Make = Callable[[int], nn.Sequential]
Script = Callable[[Session, int], None]


def chain(n: int, *first: nn.Module, last: Sequence[nn.Module] = ()) -> nn.Sequential:
    """``first``, then blocks, then ``last``: n layers."""
    return nn.Sequential(*first, *(Block() for _ in range(n - len(first) - len(last))), *last)


def each(layer: Callable[[], nn.Module]) -> Make:
    """A model of n such layers."""
    return lambda n: nn.Sequential(*(layer() for _ in range(n)))


def _tied(n: int) -> nn.Sequential:
    model: Any = chain(n)
    model[-1].linear.weight = model[0].linear.weight
    return nn.Sequential(*model)


def _frozen(n: int) -> nn.Sequential:
    model: Any = chain(n)
    model[0].requires_grad_(False)
    model[-1].linear.bias.requires_grad_(False)
    return nn.Sequential(*model)


def _boom(where: str) -> Make:
    return lambda n: chain(n, Block(), own.Boom(where))


def _spectral(n: int) -> nn.Sequential:
    model: Any = chain(n)
    for layer in model:
        torch.nn.utils.parametrizations.spectral_norm(layer.linear)
    return nn.Sequential(*model)


def _behaviour(
    name: str,
    says: str,
    make: Make,
    script: Script,
    grid: Sequence[Setup] = SMALL,
    *,
    check: Any = scripts.same,
    needs: str = "",
    raises: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Behaviour:
    def case(setup: Setup, seed: int, per_device: int) -> Case:
        mode = setup.checkpoint
        wanted = {"never": (), "always": ("checkpoint",), "except_last": ("checkpoint", "except_last")}[mode]
        placed = replace(setup, per_device=per_device)
        return Case(
            placed, lambda: make(placed.partitions), lambda s: script(s, seed), frozenset((*needs.split(), *wanted)), dtype  # noqa: E501
        )  # fmt: skip

    return Behaviour(name, says, lambda seed, per: [case(setup, seed, per) for setup in grid], check, raises)


def _of_batches_and_losses() -> Iterator[Behaviour]:
    few = (Setup(3, 1), Setup(3, 2), Setup(3, 2, "always"))
    yield _behaviour("chain", "loss and gradients of a chain", chain, scripts.one_step, GRID)
    yield _behaviour(
        "uneven",
        "10 rows in 4 micro-batches",
        chain,
        scripts.uneven,
        (Setup(2, 4), Setup(3, 4, "always")),
        needs="uneven",
    )
    yield _behaviour("few", "fewer micro-batches than devices", chain, scripts.one_step, few, needs="few")
    yield _behaviour("shapes", "other sizes from step to step", chain, scripts.shapes, needs="shapes")
    yield _behaviour("sum", "a loss that is a sum", chain, scripts.sums)
    yield _behaviour("labels", "a mean over labels, of which some are ignored", chain, scripts.labels)
    yield _behaviour("no labels", "a micro-batch without any label", chain, scripts.no_labels)
    yield _behaviour("norm", "norm of all gradients, and clipping by it", chain, scripts.clipped, needs="clip")
    yield _behaviour(
        "norm to the bit",
        "the norm adds up in the order of the model",
        chain,
        scripts.norms,
        (Setup(3, 1),),
        check=scripts.same_bits,
        needs="clip few",
    )


def _of_values_between_partitions() -> Iterator[Behaviour]:
    yield _behaviour(
        "skips",
        "two crossing skips",
        lambda n: chain(n + 2, stashing("a"), stashing("b"), last=(popping("a"), popping("b"))),
        scripts.one_step,
        GRID,
        needs="skips",
    )
    yield _behaviour(
        "skip and next",
        "a tensor to the next and to a later partition",
        lambda n: chain(n, stashing("a", same=True), last=(popping("a"),)),
        scripts.one_step,
        (Setup(3, 4), Setup(3, 4, "always")),
        needs="skips",
    )
    yield _behaviour(
        "tuples",
        "floats and integers travel along",
        lambda n: nn.Sequential(*(own.Many() for _ in range(n - 1)), own.Merge()),
        scripts.tuples,
        needs="tuples",
    )
    yield _behaviour(
        "none",
        "None between partitions",
        lambda n: nn.Sequential(*(own.WithNone() for _ in range(n - 1)), own.First()),
        scripts.one_step,
        needs="none",
    )
    yield _behaviour(
        "beside",
        "a value that no loss uses",
        lambda n: chain(n, own.Beside(), own.First()),
        scripts.one_step,
        needs="tuples",
    )


def _of_parameters() -> Iterator[Behaviour]:
    yield _behaviour("frozen", "a frozen first layer, a frozen bias", _frozen, scripts.one_step, GRID)
    yield _behaviour("unused", "AdamW leaves weights without use", lambda n: chain(n, own.Spare()), scripts.optimized)
    yield _behaviour("tied", "a weight in the first and the last layer", _tied, scripts.one_step, GRID, needs="tied")
    yield _behaviour("accumulate", "three steps add up", chain, scripts.accumulated)
    yield _behaviour(
        "accumulate by default",
        "three steps add up with the engine's own settings",
        chain,
        scripts.accumulated,
        (Setup(2, 2, defaults=True),),
        needs="defaults",
    )
    yield _behaviour("optimizer", "weights after three steps of AdamW", chain, scripts.optimized)
    yield _behaviour("flat gradients", "gradients are added in place", chain, scripts.flat_grads)
    yield _behaviour("evaluation", "evaluation before and between steps", chain, scripts.evaluated, needs="evaluate")


def _of_random_layers() -> Iterator[Behaviour]:
    noise = each(own.Noise)
    yield _behaviour(
        "masks again", "recomputation draws the masks of the loss", noise, scripts.euler, GRID, check=scripts.same_masks
    )
    yield _behaviour(
        "late masks",
        "a layer that first draws in the second step",
        noise,
        scripts.late,
        GRID[::3],
        check=scripts.same_masks,
    )
    yield _behaviour("own masks", "each micro-batch has masks of its own", noise, scripts.masks)
    yield _behaviour("seeds", "a seed repeats masks, another one does not", noise, scripts.repeated)
    yield _behaviour("generator", "a step without random layers draws nothing", chain, scripts.generator)


def _of_layers_with_side_effects() -> Iterator[Behaviour]:
    one = (Setup(2, 1), Setup(3, 1, "always"))
    yield _behaviour(
        "batch norm",
        "statistics of the batch or of its micro-batches",
        each(lambda: nn.BatchNorm1d(own.WIDTH)),
        scripts.running,
        GRID,
        check=scripts.statistics,
    )
    yield _behaviour(
        "spectral norm", "a buffer that each forward pass changes", _spectral, scripts.one_step, one, needs="few"
    )
    yield _behaviour(
        "main_grad", "a function that adds its gradient itself", each(lambda: own.Custom(own.Fused)), scripts.main_grads
    )
    yield _behaviour(
        "writes gradient",
        "a function that writes into the gradient it gets",
        each(lambda: own.Custom(own.InPlace)),
        scripts.one_step,
    )
    yield _behaviour("hooks", "hooks of parameters", chain, scripts.hooked, check=scripts.hooks_fire)
    yield _behaviour(
        "hook on input", "a layer that registers a hook on its input", each(own.HookOnInput), scripts.one_step
    )
    yield _behaviour(
        "writes input",
        "layers that work in place",
        lambda n: nn.Sequential(Block(), *(own.WritesInput() for _ in range(n - 1))),
        scripts.one_step,
    )
    yield _behaviour("batch stays", "the caller's batch is not written to", chain, scripts.caller)


def _of_passes_and_memory() -> Iterator[Behaviour]:
    yield _behaviour(
        "passes", "number of forward passes", chain, scripts.passes, GRID, check=scripts.forward_passes, needs="passes"
    )
    yield _behaviour(
        "backward order",
        "number and order of backward passes",
        each(own.Probe),
        scripts.backward,
        GRID,
        check=scripts.backward_passes,
        needs="passes",
    )
    yield _behaviour(
        "memory",
        "activations alive at once, and after the step",
        each(own.Probe),
        scripts.memory,
        GRID,
        check=scripts.memory_bounds,
        needs="passes",
    )


def _of_precision_and_errors() -> Iterator[Behaviour]:
    yield _behaviour("autocast", "autocast reaches the layers", each(own.Typed), scripts.cast)
    yield _behaviour("float16", "gradients of half precision", chain, scripts.one_step, dtype=torch.float16)
    yield _behaviour("nan", "NaN in one row is seen", chain, scripts.nan)
    for where in ("forward", "backward"):
        yield _behaviour(
            f"error in {where}",
            "an error of a layer surfaces",
            _boom(where),
            scripts.errors,
            (Setup(2, 4), Setup(3, 4, "always")),
            check=scripts.surfaces,
            raises=True,
        )
    yield _behaviour("after an error", "the step after one that failed", chain, scripts.after_error, needs="recovery")


def _of_several_pipelines() -> Iterator[Behaviour]:
    yield _behaviour(
        "replicas",
        "two pipelines share a batch",
        chain,
        scripts.shared_batch,
        (Setup(2, 2, replicas=2),),
        needs="replicas",
    )
    yield _behaviour(
        "tensor parallel",
        "two processes share each partition",
        each(own.Sharded),
        scripts.sharded,
        (Setup(2, 2, shards=2), Setup(2, 4, "always", shards=2)),
        needs="shards",
    )


_KINDS = (
    *(_of_batches_and_losses, _of_values_between_partitions, _of_parameters, _of_random_layers),
    *(_of_layers_with_side_effects, _of_passes_and_memory, _of_precision_and_errors, _of_several_pipelines),
)

BEHAVIOURS = {behaviour.name: behaviour for kind in _KINDS for behaviour in kind()}
"""The behaviours, by name."""
