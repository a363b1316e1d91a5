"""Calls the functions of a model of one's own and checks what they return: the model, its inputs and its target."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpipe_bench.errors import ConfigError
from gpipe_bench.models.arguments import Value, Values
from gpipe_bench.models.own_files import OwnName
from gpipe_bench.models.own_loading import blamed

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gpipe_bench.models.spec import Device

T = TypeVar("T")

_HINT: Final = "correct the function or its arguments"


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """What a function can be given by name."""
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {key: parameter for key, parameter in known.items() if parameter.kind in by_name}


@dataclass(frozen=True)
class OwnFunctions:
    """The functions of one model.

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
        """The model, on the current default device; on the CPU where that is meta and the function needs values.

        Raises:
            ConfigError: the function raised something, or gave no nn.Sequential that a pipeline can be made of.
        """
        from torch import nn

        from gpipe_bench.autograd.sequential import check_outermost, check_sharing

        with blamed(self.own, f"be made by {self.name}", _HINT):
            module = _made(lambda: self.function(**values))
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

    def layers(self, values: tuple[tuple[str, Value], ...]) -> int:
        """How many layers the model has."""
        import torch

        with torch.device("meta"):
            return len(self.network(dict(values)))

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
        known = parameters_of(function)
        given = {key: value for key, value in values.items() if key in known}
        with (
            blamed(self.own, f"have inputs that {label} makes", _HINT),
            torch.random.fork_rng(devices=[]),
            torch.device("cpu" if device is None else device),
        ):
            if generator is not None:
                # The function draws from PyTorch's own generator.
                seed = torch.randint(2**62, (), generator=generator, device=generator.device)
                torch.default_generator.manual_seed(int(seed))
            made = _made(lambda: function(batch_size, **given))
        return self._checked(made, batch_size, device)

    def _checked(self, made: object, batch_size: int, device: Device) -> tuple[Tensor, Tensor]:
        """Inputs and target of a batch; where there is only one tensor it is both.

        Raises:
            ConfigError: these are no tensors of so many samples.
        """
        from torch import Tensor

        pair = made if isinstance(made, tuple) else (made, made)
        good = len(pair) == 2 and all(isinstance(part, Tensor) and part.dim() for part in pair)
        if not good or any(len(part) != batch_size for part in pair):
            parts = [str(list(part.shape)) if isinstance(part, Tensor) else repr(part)[:60] for part in pair]
            got = f"{' and '.join(parts) or 'nothing'} from {self.own.function}_batch"
            rule = f"must have a tensor of inputs, or (inputs, target), of {batch_size} samples, got {got}"
            raise ConfigError([f"model {rule}; return tensors with batch_size as their first dimension"])
        return pair[0].to(device), pair[1].to(device)


def _made(make: Callable[[], T]) -> T:
    """What ``make`` makes; if that fails on the meta device, where there are no values, what it makes on the CPU."""
    import torch

    if not torch.empty(0).is_meta:
        return make()
    try:
        return make()
    except Exception:  # noqa: BLE001 - what is wrong on the CPU too is said there
        threads = torch.get_num_threads()
        # A process that has computed with several threads can no longer be forked.
        torch.set_num_threads(1)
        try:
            with torch.device("cpu"):
                return make()
        finally:
            torch.set_num_threads(threads)
