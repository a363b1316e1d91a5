"""The models of the race, its batches and its weights: the same in every process.

``unet`` and ``gpt2`` are those of the table of models. Two more are the race's own: ``tiny``, layers so small that
nothing but the host's work takes time, and ``convnet``, convolutions without anything that joins the samples of a
batch, so that micro-batches and the whole batch have the same gradients.
"""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from gpipe_bench.errors import ConfigError
from gpipe_bench.models.arguments import Argument, Values, read_text
from gpipe_bench.models.classification import class_labels, cross_entropy
from gpipe_bench.models.spec import ModelSpec
from gpipe_bench.models.table import MODELS, UNET

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn

    from gpipe_bench.models.spec import Device
    from studies.peers.cases import PeerCase


def _tiny(arguments: Values) -> nn.Sequential:
    from torch import nn

    width = int(arguments["width"])
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(int(arguments["L"]))))


def _vectors(batch_size: int, arguments: Values, generator: torch.Generator | None, device: Device) -> Tensor:
    import torch

    return torch.rand(batch_size, int(arguments["width"]), generator=generator, device=device)


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.mse_loss(output, target)


def _convnet(arguments: Values) -> nn.Sequential:
    from torch import nn

    channels, layers = int(arguments["C"]), OrderedDict[str, nn.Module]()
    for k in range(int(arguments["L"])):
        layers[f"conv{k}"] = nn.Conv2d(channels if k else 3, channels, kernel_size=3, padding=1)
        layers[f"relu{k}"] = nn.ReLU()
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["logits"] = nn.Linear(channels, int(arguments["classes"]))
    return nn.Sequential(layers)


TINY: Final = ModelSpec(
    name="tiny",
    arguments=MappingProxyType(
        {
            "L": Argument(int, 4, "layers, each Linear and ReLU", minimum=1),
            "width": Argument(int, 4, "features", minimum=1),
        }
    ),
    network=_tiny,
    layers=lambda a: int(a["L"]),
    input_shape=lambda a: (int(a["width"]),),
    target=_vectors,
    loss=_mean_square,
    source="none: layers without work",
)
CONVNET: Final = ModelSpec(
    name="convnet",
    arguments=MappingProxyType(
        {
            "L": Argument(int, 8, "convolutions", minimum=1),
            "C": Argument(int, 32, "channels", minimum=1),
            "size": Argument(int, 32, "height and width of the images, in pixels", minimum=1),
            "classes": Argument(int, 10, "number of classes", minimum=1),
        }
    ),
    network=_convnet,
    layers=lambda a: 2 * int(a["L"]) + 3,
    input_shape=lambda a: (3, int(a["size"]), int(a["size"])),
    target=class_labels,
    loss=cross_entropy,
    source="none: 3x3 convolutions of one width",
)
RACED: Final = {spec.name: spec for spec in (TINY, CONVNET, UNET, MODELS["gpt2"])}


def raced_arguments(model: str, text: str) -> dict[str, int | float | bool]:
    """All arguments of a model of the race, read from text such as ``L=8;C=32``.

    Raises:
        ConfigError: unknown names, values that break a rule; all of them.
    """
    pairs, problems = read_text(text)
    if problems:
        raise ConfigError(problems)
    return RACED[model].check(pairs)


class Work(NamedTuple):
    """What a contender trains on.

    Attributes:
        model: on the CPU, in training.
        batch: (N, ...), on the CPU.
        target: likewise.
        loss: (output, target) -> mean over samples.
    """

    model: nn.Sequential
    batch: Tensor
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


def make_work(case: PeerCase) -> Work:
    """Model, batch and loss of ``case``; they follow from the case alone."""
    import torch

    spec = RACED[case.model]
    arguments = raced_arguments(case.model, case.model_args)
    torch.manual_seed(case.seed)
    model = spec.build(**arguments)
    generator = torch.Generator().manual_seed(case.seed)
    batch, target = spec.make_batch(case.batch_size, arguments, generator)
    dtype: torch.dtype = getattr(torch, case.precision)
    batch, target = (tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in (batch, target))
    return Work(model.to(dtype), batch, target, spec.loss)
