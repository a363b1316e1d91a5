"""Networks of published runs that the suite itself does not train; rows of published tables name them.

The table of models finds them by name, and does not list them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from gpipe_bench.models.arguments import Argument, Values
from gpipe_bench.models.classification import class_labels, cross_entropy
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

PUBLISHED: Final = (RESNET101,)
"""All of them."""
