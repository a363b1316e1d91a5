"""Models of one's own: a function that makes an ``nn.Sequential``, named where a model of the table is named.

    def net(width=64):                         makes the model; arguments with defaults are the model's arguments
    def net_batch(batch_size, width=64):       makes inputs, or (inputs, target)
    def net_loss(output, target):              optional; the mean of the squared output by default

In place of a function there may be a :class:`.spec.ModelSpec`. The module is imported when something of the model is
asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.models.arguments import Argument, Value
from gpipe_bench.models.own_files import OwnName, own_digest, portable, split_name
from gpipe_bench.models.own_functions import OwnFunctions, parameters_of
from gpipe_bench.models.own_loading import function_of, line_of, optional_function
from gpipe_bench.models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

_TYPES: Final[Mapping[str, type[Value]]] = MappingProxyType({"int": int, "float": float, "bool": bool})


def is_own(name: object) -> bool:
    """Whether ``name`` has the form of these models: a file or module, ``:``, and a function."""
    return split_name(name) is not None


def own_spec(name: str) -> ModelSpec:
    """The model ``place:function``.

    Raises:
        ConfigError: there is no such file, module or function, or importing it fails.
    """
    own = split_name(name)
    assert own is not None  # noqa: S101 - the caller has asked
    return _spec(own, str(Path.cwd()), own_digest(own))


def uses_default_loss(name: str) -> bool:
    """Whether a model has no loss function, so that the mean of the squared output stands in.

    Raises:
        ConfigError: as :func:`own_spec`.
    """
    return is_own(name) and own_spec(name).loss is _mean_square


def own_line(name: str, error: BaseException) -> str:
    """The line of a model's files that an exception came from; empty if there is none, or the model is no such."""
    own = split_name(name)
    return line_of(own, error) if own else ""


@lru_cache(maxsize=64)
def _spec(own: OwnName, _folder: str, digest: str) -> ModelSpec:
    name, function = portable(str(own)), function_of(own, digest)
    if isinstance(function, ModelSpec):
        return replace(function, name=name)
    if not callable(function) or (hasattr(function, "state_dict") and not isinstance(function, type)):
        rule = "must be a function that returns an nn.Sequential"
        got = f"got a value of type {type(function).__name__} in {name}"
        raise ConfigError([f"model {rule}, {got}; write 'def {own.function}(): return nn.Sequential(...)'"])
    made = OwnFunctions(own, name, function, optional_function(own, digest, "_batch"))
    layers, entering = lru_cache(maxsize=64)(made.layers), lru_cache(maxsize=64)(made.entering)
    return ModelSpec(
        name=name,
        arguments=MappingProxyType(_arguments(name, function)),
        network=made.network,
        layers=lambda values: layers(tuple(values.items())),
        input_shape=lambda values: entering(tuple(values.items()))[0],
        input_type=lambda values: entering(tuple(values.items()))[1],
        batch=made.batch,
        loss=optional_function(own, digest, "_loss") or _mean_square,
        source=f"the function {name}",
    )


def _arguments(name: str, function: Callable[..., Any]) -> dict[str, Argument]:
    """The arguments that a default or an annotation says the type of."""
    found = {}
    for key, parameter in parameters_of(function).items():
        if parameter.default is parameter.empty:
            rule = f"must be a function whose arguments have defaults, got {key!r} of {name} without"
            raise ConfigError([f"model {rule}; write '{key}=<value>'"])
        annotation = str(getattr(parameter.annotation, "__name__", parameter.annotation))
        kind = _TYPES.get(annotation, type(parameter.default))
        default = float(parameter.default) if kind is float and type(parameter.default) is int else parameter.default
        if kind in _TYPES.values() and type(default) is kind:
            found[key] = Argument(kind, default, f"argument of {name}")
    return found


def _mean_square(output: Tensor, _: Tensor) -> Tensor:
    if not hasattr(output, "square"):
        raise TypeError(f"the output must be one tensor, got {type(output).__name__}: write a loss function")
    return output.square().mean()
