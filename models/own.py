"""Models of one's own: a function that makes an ``nn.Sequential``, named where a model of the table is named.

    def net(width=64):                         makes the model; arguments with defaults are the model's arguments
    def net_batch(batch_size, width=64):       makes inputs, or (inputs, target)
    def net_loss(output, target):              optional; the mean of the squared output by default

In place of a function there may be a :class:`.spec.ModelSpec`. The module is imported when something of the model is
asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.models.arguments import Argument, Value, Values
from gpipe_bench.models.own_files import OwnName, own_digest, portable, split_name
from gpipe_bench.models.own_loading import blamed, function_of, optional_function
from gpipe_bench.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gpipe_bench.models.spec import Device

__all__ = ["is_own", "own_spec", "uses_default_loss"]

_TYPES: Final[Mapping[str, type[Value]]] = MappingProxyType({"int": int, "float": float, "bool": bool})
_HINT: Final = "correct the function or its arguments"


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
    own = split_name(name)
    if own is None or not own_spec(name).source.startswith(_FUNCTION):
        return False
    return optional_function(own, own_digest(own), "_loss") is None


_FUNCTION: Final = "function "


@lru_cache(maxsize=64)
def _spec(own: OwnName, _folder: str, digest: str) -> ModelSpec:
    name, function = portable(str(own)), function_of(own, digest)
    if isinstance(function, ModelSpec):
        return replace(function, name=name)
    if not callable(function) or hasattr(function, "state_dict") and not isinstance(function, type):
        kind = type(function).__name__
        hint = f"write 'def {own.function}(): return nn.Sequential(...)'"
        raise ConfigError([f"model must be a function that returns an nn.Sequential, got a {kind} in {name}; {hint}"])
    made = _Own(own, name, function, optional_function(own, digest, "_batch"))
    return ModelSpec(
        name=name,
        arguments=MappingProxyType(_arguments(name, function)),
        network=made.network,
        layers=lambda values: made.layers(tuple(values.items())),
        input_shape=lambda values: made.entering(tuple(values.items()))[0],
        input_type=lambda values: made.entering(tuple(values.items()))[1],
        batch=made.batch,
        loss=optional_function(own, digest, "_loss") or _mean_square,
        source=f"{_FUNCTION}{name}",
    )


def _arguments(name: str, function: Callable[..., Any]) -> dict[str, Argument]:
    """The arguments that a default or an annotation says the type of."""
    found = {}
    for key, parameter in _parameters(function).items():
        if parameter.default is parameter.empty:
            rule = f"must be a function whose arguments have defaults, got {key!r} of {name} without"
            raise ConfigError([f"model {rule}; write '{key}=<value>'"])
        annotation = getattr(parameter.annotation, "__name__", parameter.annotation)
        kind = _TYPES.get(annotation, type(parameter.default))
        default = float(parameter.default) if kind is float and type(parameter.default) is int else parameter.default
        if kind in _TYPES.values() and type(default) is kind:
            found[key] = Argument(kind, default, f"argument of {name}")
    return found


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """What can be given by name."""
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {key: parameter for key, parameter in known.items() if parameter.kind in by_name}


def _mean_square(output: Tensor, _: Tensor) -> Tensor:
    return output.square().mean()


@dataclass(frozen=True, eq=False)
class _Own:
    """What the functions of a model make, checked.

    Attributes:
        own: the model's name in parts.
        name: the model's name.
        function: makes the model.
        batch_function: makes a batch, if there is one.
    """

    own: OwnName
    name: str
    function: Callable[..., Any]
    batch_function: Callable[..., Any] | None

    def network(self, values: Values) -> nn.Sequential:
        """The model.

        Raises:
            ConfigError: the function raised something, or gave no nn.Sequential that a pipeline can be made of.
        """
        from torch import nn

        from gpipe_bench.engine.sequential import check_outermost, check_sharing

        with blamed(self.own, f"be made by {self.name}", _HINT):
            module = self.function(**values)
        if not isinstance(module, nn.Sequential) or not len(module):
            got = "an empty one" if isinstance(module, nn.Sequential) else f"a value of type {type(module).__name__}"
            rule = f"must be an nn.Sequential with one layer or more, got {got} from {self.name}"
            raise ConfigError([f"model {rule}; return nn.Sequential(layer, layer, ...)"])
        try:
            check_outermost(module)
            check_sharing(module)
        except (TypeError, ValueError) as error:
            raise ConfigError([f"model must be one that a pipeline takes, got {self.name}: {error}"]) from error
        return module

    @lru_cache(maxsize=64)
    def layers(self, values: tuple[tuple[str, Value], ...]) -> int:
        """How many layers it has; made without memory for its weights where that is possible."""
        return len(self._on_meta(lambda: self.network(dict(values))))

    @lru_cache(maxsize=64)
    def entering(self, values: tuple[tuple[str, Value], ...]) -> tuple[tuple[int, ...], str]:
        """Shape and type of one sample."""
        inputs, _ = self.batch(2, dict(values), None, "meta")
        return tuple(inputs.shape[1:]), str(inputs.dtype).removeprefix("torch.")

    def batch(
        self, batch_size: int, values: Values, generator: torch.Generator | None, device: Device
    ) -> tuple[Tensor, Tensor]:
        """Inputs and target.

        Raises:
            ConfigError: there is no batch function, it raised something, or gave no batch.
        """
        import torch

        function, label = self.batch_function, f"{self.own.function}_batch"
        if function is None:
            shown = f"def {label}(batch_size): return torch.rand(batch_size, 3, 32, 32)"
            rule = f"must come with a function {label}(batch_size) in {self.own.place}, which makes its inputs"
            raise ConfigError([f"model {rule}, got none; add for example '{shown}'"])
        known = _parameters(function)
        given = {key: value for key, value in values.items() if key in known}
        with blamed(self.own, f"have inputs that {label} makes", _HINT), torch.random.fork_rng(devices=[]):
            if generator is not None:
                # The function draws from PyTorch's own generator.
                seed = torch.randint(2**62, (), generator=generator, device=generator.device)
                torch.default_generator.manual_seed(int(seed))
            on_meta = torch.device("cpu" if device is None else device).type == "meta"
            if on_meta:
                made = self._on_meta(lambda: function(batch_size, **given))
            else:
                with torch.device(device):
                    made = function(batch_size, **given)
        return self._checked(made, batch_size, device)

    def _checked(self, made: object, batch_size: int, device: Device) -> tuple[Tensor, Tensor]:
        import torch

        pair = made if isinstance(made, tuple) else (made, made)
        good = len(pair) == 2 and all(isinstance(part, torch.Tensor) and part.dim() for part in pair)
        if not good or any(len(part) != batch_size for part in pair):
            got = ", ".join(str(list(part.shape)) if isinstance(part, torch.Tensor) else repr(part)[:60] for part in pair)
            rule = f"must have inputs, or (inputs, target), of {batch_size} samples, got {got} from {self.own.function}_batch"
            raise ConfigError([f"model {rule}; return tensors with batch_size as their first dimension"])
        return pair[0].to(device), pair[1].to(device)

    def _on_meta(self, make: Callable[[], Any]) -> Any:
        """What ``make`` makes without values; with values on the CPU where it asks for some."""
        import torch

        try:
            with torch.device("meta"):
                return make()
        except Exception:  # noqa: BLE001 - what is wrong there may be right on the CPU, and is said there if not
            threads = torch.get_num_threads()
            # A process that has computed with several threads can no longer be forked.
            torch.set_num_threads(1)
            try:
                with torch.device("cpu"):
                    return make()
            finally:
                torch.set_num_threads(threads)
