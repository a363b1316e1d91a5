"""What the suite knows of a model: arguments, how to build it, its batch and its loss.

Names, arguments and shapes are plain data and load without PyTorch, which the workflow needs; what touches tensors
loads it on its first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpipe_bench.errors import ConfigError
from gpipe_bench.models.arguments import Argument, Value, Values, resolve

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Device = torch.device | str | int | None


def _no_rules(_: Values) -> Sequence[str]:
    return ()


def _float32(_: Values) -> str:
    return "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model of the suite.

    The callables take complete arguments, as :meth:`check` gives them.

    Attributes:
        name: its name in configurations, rows and figures.
        arguments: what it can be given, in the order in which rows print it; defaults are the published ones.
        network: arguments -> the model; call :meth:`build`.
        layers: arguments -> the number of layers, which a balance sums to, without building them.
        input_shape: arguments -> the shape of one sample, such as (C, H, W) of an image or (T,) of tokens.
        loss: (output, target) -> scalar.
        target: (batch size, arguments, generator, device) -> a batch of targets, for inputs that are uniform in [0, 1);
            call :meth:`make_batch`.
        batch: in place of ``target``, makes a batch of inputs and its targets from the same; call :meth:`make_batch`.
        input_type: arguments -> the type of the inputs, as PyTorch calls it; float32 by default.
        rules: arguments -> what is wrong with their combination; nothing by default.
        source: papers that the definition comes from.
    """

    name: str
    arguments: Mapping[str, Argument]
    network: Callable[[Values], nn.Sequential]
    layers: Callable[[Values], int]
    input_shape: Callable[[Values], tuple[int, ...]]
    loss: Callable[[Tensor, Tensor], Tensor]
    target: Callable[[int, Values, torch.Generator | None, Device], Tensor] | None = None
    batch: Callable[[int, Values, torch.Generator | None, Device], tuple[Tensor, Tensor]] | None = None
    input_type: Callable[[Values], str] = _float32
    rules: Callable[[Values], Sequence[str]] = _no_rules
    source: str = ""

    def check(self, given: Mapping[str, object]) -> dict[str, Value]:
        """All arguments in declared order: the given ones, as values or as text, and defaults for the rest.

        Raises:
            ConfigError: unknown names, values that break a rule; all problems at once.
        """
        values = resolve(self.name, self.arguments, given)
        problems = self.rules(values)
        if problems:
            raise ConfigError(problems)
        return values

    def build(self, **arguments: object) -> nn.Sequential:
        """The model with fresh weights, on PyTorch's current default device.

        Raises:
            ConfigError: see :meth:`check`.
        """
        return self.network(self.check(arguments))

    def make_batch(
        self,
        batch_size: int,
        arguments: Mapping[str, object],
        generator: torch.Generator | None = None,
        device: Device = None,
    ) -> tuple[Tensor, Tensor]:
        """A random batch and its targets, as the published runs made them.

        Args:
            batch_size: samples, N.
            arguments: of the model; missing ones take their defaults.
            generator: source of the random numbers. They are drawn on its device, so one CPU generator gives every
                device the same batch.
            device: where the batch goes; on the meta device nothing is drawn.

        Returns:
            (input of shape (N, *input_shape), target).

        Raises:
            ConfigError: see :meth:`check`.
        """
        import torch

        complete = self.check(arguments)
        place = torch.device("cpu" if device is None else device)
        if place.type == "meta":
            origin, generator = place, None
        else:
            origin = torch.device("cpu") if generator is None else generator.device
        if self.batch is not None:
            inputs, target = self.batch(batch_size, complete, generator, origin)
        else:
            assert self.target is not None  # noqa: S101 - a spec has one of them
            inputs = torch.rand(batch_size, *self.input_shape(complete), generator=generator, device=origin)
            target = self.target(batch_size, complete, generator, origin)
        return inputs.to(device), target.to(device)
