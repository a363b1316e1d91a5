"""Weights that an older pipeline saved, under the names of the plain module.

torchgpipe, fairscale and PyTorch's Pipe put a number of the partition before each name, PyTorch's counts the layers of
each partition anew, and all wrap skippable layers once more:

    partitions.1.0.module.conv.weight   ->   3.conv.weight

What they did not change is the order of the entries, which is that of the layers; so names are given by position, and
shapes and last parts of the names have to agree.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

# Buffers that the old deferred batch normalisation had besides; they are empty between batches.
_GATHERED = ("sum", "sum_squares")


def renamed_state_dict(state: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """The entries of ``state`` under the names of ``module``, ready for ``module.load_state_dict``.

    Args:
        state: state_dict of a pipeline of torchgpipe, fairscale or ``torch.distributed.pipeline.sync``.
        module: the same layers in the same order, as a plain module or in a pipeline of this package.

    Raises:
        ValueError: numbers, kinds or shapes of the entries do not agree.
    """
    given = {name: tensor for name, tensor in state.items() if not _is_gathered(name, state)}
    wanted = module.state_dict()
    if len(given) != len(wanted):
        raise ValueError(
            f"state must have the {len(wanted)} entries of the module, got {len(given)}; pass the state_dict of a "
            "pipeline of the same layers"
        )
    for (old, tensor), (new, expected) in zip(given.items(), wanted.items(), strict=True):
        if old.rpartition(".")[2] != new.rpartition(".")[2] or tensor.shape != expected.shape:
            raise ValueError(
                f"state must have the entries of the module in their order, got {old!r} of shape {list(tensor.shape)} "
                f"in the place of {new!r} of shape {list(expected.shape)}; build the module with the same layers"
            )
    return dict(zip(wanted, given.values(), strict=True))


def _is_gathered(name: str, state: Mapping[str, Tensor]) -> bool:
    layer, _, last = name.rpartition(".")
    return last in _GATHERED and f"{layer}.running_mean" in state
