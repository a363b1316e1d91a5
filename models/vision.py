"""Networks of torchvision and timm, cut into layers, under names such as ``torchvision/resnet101``.

Any classification network of theirs that :func:`.chain.chain_of` can cut is a model of the suite. Weights are
random, nothing is downloaded. This module loads without PyTorch; looking a network up loads its library, which knows
the names and the image size that each was made for.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.errors import ConfigError, UnsupportedError
from gpipe_bench.models.arguments import Argument, Values
from gpipe_bench.models.classification import class_labels, cross_entropy
from gpipe_bench.models.spec import ModelSpec
from gpipe_bench.util.nearest import nearest

if TYPE_CHECKING:
    from torch import nn

    from gpipe_bench.models.pieces import Piece

# The argument that torchvision's builders of these modules have for the size of the images.
_SIZES: Final[Mapping[str, Callable[[int], dict[str, Any]]]] = MappingProxyType(
    {"vision_transformer": lambda size: {"image_size": size}, "maxvit": lambda size: {"input_size": (size, size)}}
)
_DEFAULT_SIZE: Final = {"inception_v3": 299}


def is_vision(name: object) -> bool:
    """Whether ``name`` has the form of these models: a library, ``/``, and a name of the library."""
    return isinstance(name, str) and name.partition("/")[0] in FAMILIES and "/" in name


@cache
def vision_spec(name: str) -> ModelSpec:
    """The model ``library/network``.

    Raises:
        ConfigError: the library has no such network, or is not installed.
    """
    library, _, network = name.partition("/")
    builder, size, known = FAMILIES[library](network)
    if builder is None:
        near = nearest(name, [f"{library}/{other}" for other in known]) if known else "install another version"
        if near.startswith("use one of"):
            near = f"use one of the {len(known)} models of {library}, such as '{library}/{known[0]}'"
        raise ConfigError([f"model must be one that {library} has, got {name!r}; {near}"])

    return ModelSpec(
        name=name,
        arguments=MappingProxyType(
            {
                "size": Argument(int, size, "height and width of the images, in pixels", minimum=1),
                "classes": Argument(int, 1000, "number of classes", minimum=2),
            }
        ),
        network=lambda values: _chain(name, builder(values), values),
        layers=lambda values: len(_pieces(name, tuple(values.items()))),
        input_shape=lambda values: (3, int(values["size"]), int(values["size"])),
        target=class_labels,
        loss=cross_entropy,
        source=f"{network} of {library} {metadata.version(library)}",
    )


def original(name: str, **arguments: object) -> nn.Module:
    """The network as its library makes it, with random weights.

    Raises:
        ConfigError: as :func:`vision_spec`, and arguments that break a rule.
    """
    library, _, network = name.partition("/")
    values = vision_spec(name).check(arguments)
    module: nn.Module = FAMILIES[library](network)[0](values)
    return module


def cut_network(module: nn.Module, size: int) -> nn.Sequential:
    """A network of torchvision or timm, or one like theirs, as layers; they share its parameters and buffers.

    Args:
        module: takes images of shape (N, 3, size, size); N of at least 2 in training.
        size: height and width of the images it is traced with; others do as well where the network takes them.

    Raises:
        UnsupportedError: the forward cannot be traced, or its layers would do something else than the network.

    Warns:
        UserWarning: one layer holds more than half of the weights.
    """
    from gpipe_bench.models.chain import assemble
    from gpipe_bench.models.pieces import heavy_layer

    pieces = _cut(_without_values(module), size)
    if heavy := heavy_layer(pieces):
        warnings.warn(f"{type(module).__name__}: {heavy}", stacklevel=2)
    return assemble(pieces, module)


def heavy_layer_of(name: str, values: Values) -> str | None:
    """What to know of a model in which one layer holds more than half of the weights; None for another one.

    Args:
        name: of any model of the suite.
        values: complete arguments of it.
    """
    if not is_vision(name):
        return None
    from gpipe_bench.models.pieces import heavy_layer

    return heavy_layer(_pieces(name, tuple(values.items())))


def _without_values(module: nn.Module) -> nn.Module:
    """A copy on the meta device, made without copying a value."""
    import torch
    from torch import nn

    twins: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        twins[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(module, twins)


def _chain(name: str, module: nn.Module, values: Values) -> nn.Sequential:
    from gpipe_bench.models.chain import assemble

    return assemble(_pieces(name, tuple(values.items())), module)


@cache
def _pieces(name: str, values: tuple[tuple[str, Any], ...]) -> tuple[Piece, ...]:
    """How the network is cut, found once and without memory for its weights."""
    import torch

    size = int(dict(values)["size"])
    with torch.device("meta"):
        module = original(name, **dict(values))
    try:
        return _cut(module, size)
    except (UnsupportedError, RuntimeError, AssertionError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            [f"model must be one that can be cut into layers, got {name} at size {size}: {reason}; change either"]
        ) from error


def _cut(module: nn.Module, size: int) -> tuple[Piece, ...]:
    from gpipe_bench.models.chain import cut

    whole: list[Any] = []
    functions: list[Any] = []
    timm: Any = sys.modules.get("timm")
    if timm is not None:
        whole, functions = timm.layers.get_notrace_modules(), timm.layers.get_notrace_functions()
    return cut(module, (2, 3, size, size), whole=whole, functions=functions)


def _timm(network: str) -> tuple[Any, int, list[str]]:
    """Builder, default size and known names of timm."""
    from gpipe_bench.models.vision_packages import load_timm

    timm = load_timm()
    if network not in timm.list_models():
        return None, 0, timm.list_models()
    config = timm.get_pretrained_cfg(network)
    size = config.input_size[-1] if config is not None and config.input_size else 224

    def build(values: Values) -> Any:
        given = {"img_size": int(values["size"])} if _is_fixed(timm, network) else {}
        return timm.create_model(network, pretrained=False, num_classes=int(values["classes"]), **given)

    return build, size, []


def _is_fixed(timm: Any, network: str) -> bool:
    """Whether the network is made for one size, and takes it as an argument."""
    config = timm.get_pretrained_cfg(network)
    return bool(config is not None and config.fixed_input_size)


def _torchvision(network: str) -> tuple[Any, int, list[str]]:
    """Builder, default size and known names of torchvision's classification networks."""
    from gpipe_bench.models.vision_packages import load_torchvision

    models: Any = load_torchvision()
    known = models.list_models(module=models)
    if network not in known:
        return None, 0, known
    function: Any = models.get_model_builder(network)
    sized = _SIZES.get(function.__module__.rpartition(".")[2], lambda _: {})

    def build(values: Values) -> Any:
        given = sized(int(values["size"])) | extra  # type: ignore[no-untyped-call]  # torchvision annotates no results
        made: Any = models.get_model
        return made(network, weights=None, num_classes=int(values["classes"]), **given)

    # Heads that help in training only make a second output.
    extra = {"aux_logits": False, "init_weights": True} if network in ("googlenet", "inception_v3") else {}
    return build, _DEFAULT_SIZE.get(network, 224), known


FAMILIES: Final[Mapping[str, Callable[[str], tuple[Any, int, list[str]]]]] = MappingProxyType(
    {"timm": _timm, "torchvision": _torchvision}
)
"""Libraries, by the prefix of their models."""
