"""Networks of published runs that the suite itself does not train; rows of published tables name them.

The table of models finds them by name, and does not list them.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from gpipe_bench.models.arguments import Argument, Values
from gpipe_bench.models.classification import class_labels, cross_entropy
from gpipe_bench.models.language import next_tokens, token_cross_entropy, transformer_arguments, width_problems
from gpipe_bench.models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import nn


def _resnet101(arguments: Values) -> nn.Sequential:
    from gpipe_bench.models.resnet import resnet101

    return resnet101(int(arguments["classes"]))


RESNET101: Final = ModelSpec(
    name="resnet101",
    arguments=MappingProxyType(
        {
            "classes": Argument(int, 1000, "number of classes", minimum=1),
            "size": Argument(int, 224, "height and width of the images, in pixels", minimum=32),
        }
    ),
    network=_resnet101,
    layers=lambda _: 370,
    input_shape=lambda a: (3, int(a["size"]), int(a["size"])),
    target=class_labels,
    loss=cross_entropy,
    source="He et al., arXiv 1512.03385; as torchgpipe cut it, Kim et al., arXiv 2004.09910",
)


def _megatron(arguments: Values, *, causal: bool) -> nn.Sequential:
    from gpipe_bench.models.megatron import megatron

    sizes = (int(arguments[name]) for name in ("L", "D", "heads"))
    others = {"vocabulary": int(arguments["vocabulary"]), "context": int(arguments["context"])}
    return megatron(*sizes, **others, dropout=float(arguments["dropout"]), causal=causal)


def _language(name: str, causal: bool, vocabulary: int, context: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        arguments=transformer_arguments(24, 1024, 16, vocabulary, context),
        network=partial(_megatron, causal=causal),
        layers=lambda a: 2 * int(a["L"]) + 2,
        input_shape=lambda a: (int(a["context"]),),
        input_type=lambda _: "int64",
        batch=next_tokens,
        loss=token_cross_entropy,
        rules=width_problems,
        source="Shoeybi et al., arXiv 1909.08053",
    )


def _llama(arguments: Values) -> nn.Sequential:
    from gpipe_bench.models.llama import llama

    sizes = (int(arguments[name]) for name in ("L", "D", "heads"))
    return llama(*sizes, hidden=int(arguments["hidden"]), vocabulary=int(arguments["vocabulary"]))


LLAMA: Final = ModelSpec(
    name="llama",
    arguments=MappingProxyType(
        {
            "L": Argument(int, 16, "blocks", minimum=1),
            "D": Argument(int, 2048, "width", minimum=2),
            "heads": Argument(int, 32, "of the attention", minimum=1),
            "hidden": Argument(int, 8192, "width inside the MLPs", minimum=1),
            "vocabulary": Argument(int, 131072, "number of tokens", minimum=1),
            "context": Argument(int, 4096, "tokens of a sequence", minimum=1),
        }
    ),
    network=_llama,
    layers=lambda a: int(a["L"]) + 2,
    input_shape=lambda a: (int(a["context"]),),
    input_type=lambda _: "int64",
    batch=next_tokens,
    loss=token_cross_entropy,
    rules=width_problems,
    source="Touvron et al., arXiv 2302.13971",
)

PUBLISHED: Final = (
    RESNET101,
    _language("megatron-bert", causal=False, vocabulary=30592, context=512),
    _language("megatron-gpt2", causal=True, vocabulary=50304, context=1024),
    LLAMA,
)
"""All of them."""
