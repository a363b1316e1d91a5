"""GPT-2 in its four sizes for the table of models; what touches tensors loads PyTorch on its first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from gpipe_bench.models.arguments import Argument, Values
from gpipe_bench.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gpipe_bench.models.spec import Device

_SIZES: Final = {
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}
"""Blocks, width and heads."""


def _gpt2(arguments: Values) -> nn.Sequential:
    from gpipe_bench.models.gpt2 import gpt2

    return gpt2(
        int(arguments["L"]),
        int(arguments["D"]),
        int(arguments["heads"]),
        vocabulary=int(arguments["vocabulary"]),
        context=int(arguments["context"]),
        dropout=float(arguments["dropout"]),
    )


def next_tokens(
    batch_size: int, arguments: Values, generator: torch.Generator | None, device: Device
) -> tuple[Tensor, Tensor]:
    """Made-up text, and for each token the one that follows it."""
    import torch

    shape = batch_size, int(arguments["context"]) + 1
    text = torch.randint(int(arguments["vocabulary"]), shape, generator=generator, device=device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def token_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Mean over all tokens: logits of shape (N, T, vocabulary), next tokens of shape (N, T)."""
    from torch.nn import functional

    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def width_problems(arguments: Values) -> list[str]:
    """What is wrong with the width and the heads."""
    width, heads = int(arguments["D"]), int(arguments["heads"])
    rule = f"D must be a multiple of heads = {heads}: heads share the width"
    return [f"{rule}, got {width}; change either"] if width % heads else []


def transformer_arguments(blocks: int, width: int, heads: int, vocabulary: int, context: int) -> Mapping[str, Argument]:
    """The arguments of a transformer with these defaults."""
    return MappingProxyType(
        {
            "L": Argument(int, blocks, "blocks, each an attention and an MLP", minimum=1),
            "D": Argument(int, width, "width", minimum=1),
            "heads": Argument(int, heads, "of the attention", minimum=1),
            "vocabulary": Argument(int, vocabulary, "number of tokens", minimum=1),
            "context": Argument(int, context, "tokens of a sequence", minimum=1),
            "dropout": Argument(float, 0.1, "probability that a number is dropped", minimum=0, below=1),
        }
    )


def language_spec(
    name: str,
    arguments: Mapping[str, Argument],
    network: Callable[[Values], nn.Sequential],
    *,
    source: str,
    layers_per_block: int = 2,
) -> ModelSpec:
    """A model that takes tokens of shape (N, context): an embedding, L blocks, a head.

    Args:
        name: in the table of models.
        arguments: with L, D, heads, vocabulary and context.
        network: makes it.
        source: where it was published.
        layers_per_block: of the ``nn.Sequential``.
    """
    return ModelSpec(
        name=name,
        arguments=arguments,
        network=network,
        layers=lambda a: layers_per_block * int(a["L"]) + 2,
        input_shape=lambda a: (int(a["context"]),),
        input_type=lambda _: "int64",
        batch=next_tokens,
        loss=token_cross_entropy,
        rules=width_problems,
        source=source,
    )


GPT2: Final = tuple(
    language_spec(
        name,
        transformer_arguments(*size, 50257, 1024),
        _gpt2,
        source="Radford et al., Language Models are Unsupervised Multitask Learners, 2019",
    )
    for name, size in _SIZES.items()
)
"""gpt2, gpt2-medium, gpt2-large, gpt2-xl."""
