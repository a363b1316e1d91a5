"""Networks of published runs that the suite itself does not train; rows of published tables name them.

The table of models finds them by name, and does not list them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from gpipe_bench.models.arguments import Argument, Values
from gpipe_bench.models.classification import class_labels, cross_entropy
from gpipe_bench.models.language import language_spec, transformer_arguments
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


def _llama(arguments: Values) -> nn.Sequential:
    from gpipe_bench.models.llama import LLAMA_BASE, Sizes, decoder

    # Every head of queries has its own keys and values.
    names = ("L", "D", "heads", "heads", "hidden", "vocabulary")
    return decoder(replace(Sizes(*(int(arguments[name]) for name in names)), base=LLAMA_BASE))


_LLAMA: Final = MappingProxyType(
    {
        "L": Argument(int, 16, "blocks", minimum=1),
        "D": Argument(int, 2048, "width", minimum=2),
        "heads": Argument(int, 32, "of the attention", minimum=1),
        "hidden": Argument(int, 8192, "width inside the MLPs", minimum=1),
        "vocabulary": Argument(int, 131072, "number of tokens", minimum=1),
        "context": Argument(int, 4096, "tokens of a sequence", minimum=1),
    }
)
_MEGATRON: Final = (24, 1024, 16)
_SOURCE: Final = "Shoeybi et al., arXiv 1909.08053"

PUBLISHED: Final = (
    RESNET101,
    language_spec(
        "megatron-bert",
        transformer_arguments(*_MEGATRON, vocabulary=30592, context=512),
        partial(_megatron, causal=False),
        source=_SOURCE,
    ),
    language_spec(
        "megatron-gpt2",
        transformer_arguments(*_MEGATRON, vocabulary=50304, context=1024),
        partial(_megatron, causal=True),
        source=_SOURCE,
    ),
    language_spec("llama", _LLAMA, _llama, source="Touvron et al., arXiv 2302.13971", layers_per_block=1),
)
"""All of them."""
