"""The table of models, which suite, command line and tests read; it loads without PyTorch.

Batch and loss of each are those of the published runs: U-Net learns all ones by binary cross-entropy on logits,
AmoebaNet-D random classes by cross-entropy (torchgpipe 0.0.7, benchmarks), and so does the vision transformer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.models.arguments import Argument, Value, Values, format_value, read_text
from gpipe_bench.models.classification import class_labels, cross_entropy
from gpipe_bench.models.decoders import DECODERS
from gpipe_bench.models.language import GPT2
from gpipe_bench.models.measured import is_layers_file, layers_digest, layers_spec
from gpipe_bench.models.own import is_own, own_spec
from gpipe_bench.models.own_files import own_digest, split_name
from gpipe_bench.models.published import PUBLISHED
from gpipe_bench.models.spec import ModelSpec
from gpipe_bench.models.vision import FAMILIES, is_vision, vision_spec
from gpipe_bench.util.nearest import nearest

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gpipe_bench.models.spec import Device

__all__ = [
    "MODELS",
    "Argument",
    "ModelSpec",
    "check_arguments",
    "format_arguments",
    "model_digest",
    "model_spec",
    "parse_arguments",
]


def _size_problems(arguments: Values, multiple: int, because: str) -> list[str]:
    # Twice the multiple leaves 2 x 2 pixels at the narrowest layer; norms refuse a single value per channel.
    size, smallest = int(arguments["size"]), 2 * multiple
    if size % multiple == 0 and size >= smallest:
        return []
    near = max(smallest, round(size / multiple) * multiple)
    return [f"size must be a multiple of {because} = {multiple}, at least {smallest}, got {size}; use {near}"]


def _unet(arguments: Values) -> nn.Sequential:
    from gpipe_bench.models.unet import unet

    return unet(
        int(arguments["depth"]),
        int(arguments["B"]),
        int(arguments["C"]),
        in_channels=int(arguments["in"]),
        out_channels=int(arguments["out"]),
        dropout=float(arguments["dropout"]),
    )


def _ones(batch_size: int, arguments: Values, _: torch.Generator | None, device: Device) -> Tensor:
    import torch

    size = int(arguments["size"])
    return torch.ones(batch_size, int(arguments["out"]), size, size, device=device)


def _binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.binary_cross_entropy_with_logits(output, target)


UNET: Final = ModelSpec(
    name="unet",
    arguments=MappingProxyType(
        {
            "depth": Argument(int, 5, "encoders, decoders and skips", minimum=1, below=32),
            "B": Argument(int, 5, "blocks per cell", minimum=1),
            "C": Argument(int, 64, "channels of the first encoder", minimum=2, multiple=2),
            "size": Argument(int, 192, "height and width of the images, in pixels", minimum=1),
            "in": Argument(int, 3, "channels of the images", minimum=1),
            "out": Argument(int, 1, "channels of the logits", minimum=1),
            "dropout": Argument(float, 0.1, "probability that a block drops a channel", minimum=0, below=1),
        }
    ),
    network=_unet,
    layers=lambda a: int(4 * a["B"] * (2 * a["depth"] + 1) + 4 * a["depth"] + 1),
    input_shape=lambda a: (int(a["in"]), int(a["size"]), int(a["size"])),
    target=_ones,
    loss=_binary_cross_entropy,
    rules=lambda a: _size_problems(a, 2 ** int(a["depth"]), "2^depth"),
    source="Ronneberger et al., arXiv 1505.04597; (B, C) of torchgpipe, Kim et al., arXiv 2004.09910",
)


def _amoebanet_d(arguments: Values) -> nn.Sequential:
    from gpipe_bench.models.amoebanet import Quirks, amoebanet_d

    return amoebanet_d(
        int(arguments["L"]),
        int(arguments["D"]),
        classes=int(arguments["classes"]),
        size=int(arguments["size"]),
        quirks=Quirks(
            max3_is_average=bool(arguments["max3_is_average"]),
            concat_0346=bool(arguments["concat_0346"]),
            stem_relu=bool(arguments["stem_relu"]),
        ),
    )


AMOEBANET_D: Final = ModelSpec(
    name="amoebanet-d",
    arguments=MappingProxyType(
        {
            "L": Argument(int, 18, "normal cells", minimum=3, multiple=3),
            "D": Argument(int, 256, "filters; the stem has a quarter of them", minimum=8, multiple=8),
            "size": Argument(int, 224, "height and width of the images, in pixels", minimum=1),
            "classes": Argument(int, 1000, "number of classes", minimum=1),
            "max3_is_average": Argument(bool, True, "quirk of the published runs: 3x3 max pools take the average"),
            "concat_0346": Argument(bool, True, "quirk: a normal cell gives states 0, 3, 4, 6 instead of 4, 5, 6"),
            "stem_relu": Argument(bool, True, "quirk: the stem applies ReLU to the image"),
        }
    ),
    network=_amoebanet_d,
    layers=lambda a: int(a["L"]) + 6,
    input_shape=lambda a: (3, int(a["size"]), int(a["size"])),
    target=class_labels,
    loss=cross_entropy,
    rules=lambda a: _size_problems(a, 32, "2^5"),
    source="Real et al., arXiv 1802.01548; (L, D) of GPipe, Huang et al., arXiv 1811.06965",
)


def _vit(arguments: Values) -> nn.Sequential:
    from gpipe_bench.models.vit import vit

    sizes = {name: int(arguments[name]) for name in ("size", "patch", "classes")}
    return vit(int(arguments["L"]), int(arguments["D"]), int(arguments["heads"]), **sizes)


def _vit_problems(arguments: Values) -> list[str]:
    found = []
    for whole, part, what in (("size", "patch", "patches cover the image"), ("D", "heads", "heads share the width")):
        if int(arguments[whole]) % int(arguments[part]):
            rule = f"{whole} must be a multiple of {part} = {arguments[part]}: {what}"
            found.append(f"{rule}, got {arguments[whole]}; change either")
    return found


VIT: Final = ModelSpec(
    name="vit",
    arguments=MappingProxyType(
        {
            "L": Argument(int, 32, "blocks, each an attention and an MLP", minimum=1),
            "D": Argument(int, 1280, "width", minimum=1),
            "heads": Argument(int, 16, "of the attention", minimum=1),
            "size": Argument(int, 224, "height and width of the images, in pixels", minimum=1),
            "patch": Argument(int, 14, "height and width of a patch, in pixels", minimum=1),
            "classes": Argument(int, 1000, "number of classes", minimum=1),
        }
    ),
    network=_vit,
    layers=lambda a: 2 * int(a["L"]) + 2,
    input_shape=lambda a: (3, int(a["size"]), int(a["size"])),
    target=class_labels,
    loss=cross_entropy,
    rules=_vit_problems,
    source="Dosovitskiy et al., arXiv 2010.11929: by default ViT-H/14",
)


class _Table(Mapping[str, ModelSpec]):
    """The suite's own models, which it counts and lists, and others, which it finds by name.

    The others are those of published runs, of libraries and of users. Every name such as ``timm/...`` or
    ``file.py:function`` is in the table. Looking it up loads the library or the user's module, and is a ConfigError for
    a name that is not known there.
    """

    def __init__(self, *own: ModelSpec) -> None:
        self._own = {spec.name: spec for spec in own}
        self._known = self._own | {spec.name: spec for spec in PUBLISHED}

    def __getitem__(self, name: str) -> ModelSpec:
        if is_own(name):
            return own_spec(name)
        if is_layers_file(name):
            return layers_spec(name)
        return vision_spec(name) if is_vision(name) else self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known or is_vision(name) or is_own(name) or is_layers_file(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


MODELS: Final[Mapping[str, ModelSpec]] = _Table(UNET, AMOEBANET_D, VIT, *GPT2, *DECODERS)
"""Every model of the suite by name; also those of :mod:`.published`, ``timm/<name>`` and ``torchvision/<name>``, see
:mod:`.vision`, and the user's own, ``file.py:function`` and ``package.module:function``, see :mod:`.own`."""


def model_spec(name: str) -> ModelSpec:
    """The model of that name.

    Raises:
        ConfigError: there is none, or its library is not installed.
    """
    if name in MODELS:
        return MODELS[name]
    forms = [*(f"{library}/<name>" for library in FAMILIES), "<file>.py:<function>", "<module>:<function>"]
    known = ", ".join([*MODELS, *forms])
    library, slash, network = name.partition("/")
    hint = nearest(library, FAMILIES) if slash else nearest(name, MODELS)
    if name.endswith(".py"):
        hint = f"name a function in it, '{name}:<function>'"
    elif hint.startswith("use one of"):
        hint = "use one of them"
    elif slash:
        hint = f"{hint[:-1]}/{network}'"
    raise ConfigError([f"model must be one of {known}, got {name!r}; {hint}"])


def model_digest(name: str) -> str:
    """For a model of the user's own a digest of its files, which changes when one is edited; for others empty.

    Raises:
        ConfigError: there is no such file or module.
    """
    if is_layers_file(name):
        return layers_digest(name)
    own = split_name(name)
    return "" if own is None else own_digest(own)


def check_arguments(name: str, given: Mapping[str, object]) -> dict[str, Value]:
    """All arguments of a model in declared order: the given ones, as values or as text, and defaults for the rest.

    Raises:
        ConfigError: unknown model, unknown names, values that break a rule; all problems at once.
    """
    return model_spec(name).check(given)


def parse_arguments(name: str, text: str) -> dict[str, Value]:
    """:func:`check_arguments` of text such as ``depth=5;B=2``.

    Raises:
        ConfigError: as there, and text of another form; all problems at once.
    """
    spec = model_spec(name)
    pairs, problems = read_text(text)
    try:
        values = spec.check(pairs)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return values


def format_arguments(arguments: Values) -> str:
    """``key=value`` joined by ``;``, in the order given; :func:`parse_arguments` reads it back."""
    return ";".join(f"{key}={format_value(value)}" for key, value in arguments.items())
