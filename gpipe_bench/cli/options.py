"""Options of several commands: their limits, their completion, and what is said where a wish is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.errors import ConfigError, GpipeBenchError
from gpipe_bench.models.own import is_own, uses_default_loss
from gpipe_bench.models.table import MODELS, parse_arguments
from gpipe_bench.models.vision import heavy_layer_of
from gpipe_bench.util.nearest import nearest
from gpipe_bench.util.processes import PROCESSES

if TYPE_CHECKING:
    from gpipe_bench.suite.cells import Cell

_DAY_S: Final = 86_400.0
_MOST_PROCESSES: Final = 1024
_MOST_VALUES: Final = 13

Processes = Annotated[
    int,
    typer.Option(
        min=1, max=_MOST_PROCESSES, envvar=PROCESSES, help="How many processes share the work; results are the same."
    ),
]


def complete(values: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Completion of an option that takes one of some values, which are looked up when a shell asks."""

    def completion(incomplete: str) -> list[str]:
        return [value for value in values() if value.startswith(incomplete)]

    return completion


def _of(module: str) -> Any:
    """A module of this package, loaded when its values are asked for."""
    return import_module(f"gpipe_bench.{module}")


VALUES: Final[dict[str, Callable[[], Iterable[str]]]] = {
    "model": lambda: [*MODELS, "timm/", "torchvision/"],
    "variant": lambda: dict.fromkeys([*PUBLISHED, *(components.label for components in Components.factorial())]),
    "profile": lambda: _of("machine.profile").profile_names(),
    "schedule": lambda: _of("schedules").SCHEDULES,
    "network": lambda: _of("machine.networks").networks(),
    "device": lambda: _of("suite.machine").DEVICES,
    "evidence": lambda: ("measured", "emulated", "simulated"),
}
"""Values that options are completed to, by the name of a setting."""


def values_words(values: Iterable[str]) -> str:
    """The values of a choice, for the end of its help: all of them, or the first of many."""
    known = [*values]
    return f": {', '.join(known[:_MOST_VALUES])}{' ...' * (len(known) > _MOST_VALUES)}"


def named(name: str, text: str) -> Any:
    """An option that is completed like the setting ``name``."""
    return typer.Option(help=text, autocompletion=complete(VALUES[name]))


def number(text: str, least: float = 0.0, most: float = _DAY_S) -> Any:
    """An option that takes a number between limits; the default upper one is the seconds of a day."""
    return typer.Option(help=text, min=least, max=most, callback=_finite)


def _finite(value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise typer.BadParameter("it must be a number")
    return value


def stem(text: str) -> Any:
    """An option that takes the path of a figure without its suffix."""
    return typer.Option(help=text, callback=_stem)


def _stem(path: Path | None) -> Path | None:
    if path is not None and path.name in ("", ".."):
        raise typer.BadParameter("it must end in a name, to which .svg, .pdf and .png are added")
    return path


def check_device(device: str) -> None:
    """Check that this machine can measure on a device.

    Raises:
        ConfigError: there is no such device.
        DeviceCountError: ``cuda`` without a GPU.
    """
    from gpipe_bench.suite.machine import DEVICES, find_machine

    if device not in DEVICES:
        raise ConfigError([f"--device must be one of {', '.join(DEVICES)}, got {device!r}; {nearest(device, DEVICES)}"])
    find_machine(device)


HOST_BOUND: Final = "bound by the host: its launches take longer than the kernels of the busiest device"


def use_words(tf32: bool | None, launch_us: float | None) -> str:
    """How a profile is used, for the end of a sentence; '' where it is as the profile says."""
    rounded = "" if tf32 is None else f", {'all' if tf32 else 'no'} TF32"
    return rounded + ("" if launch_us is None else f", {launch_us:g} us of host time per operation")


def model_file(model: str) -> str:
    """The file of a model FILE:FUNCTION, or of times of layers; of another model a name that no file has."""
    return model.partition(":")[0]


def tell(text: str) -> None:
    """Say on stderr that a wish was changed or is of no use."""
    typer.echo(f"note: {text}", err=True)


def tell_microbatches(cells: Iterable[Cell]) -> None:
    """Say which numbers of chunks their batches do not give."""
    said = {}
    for cell in cells:
        if cell.microbatches != cell.chunks:
            said[cell.chunks, cell.batch_size] = cell.microbatches
    for (chunks, batch_size), used in said.items():
        size = -(-batch_size // chunks)
        why = f"the batch has {batch_size} sample{'s' * (batch_size > 1)}"
        why += "" if size == 1 else f" and the micro-batches {size} each"
        tell(f"chunks: {chunks} asked for, {used} used, since {why}")


def tell_layers(model: str, model_args: str) -> None:
    """Say on stderr which layer of a network that was cut holds most of the weights, if one does."""
    if heavy := heavy_layer_of(model, parse_arguments(model, model_args)):
        tell(f"{model}: {heavy}")


def tell_loss(model: str) -> None:
    """Say on stderr what stands in for the loss of a model of one's own that has none."""
    if uses_default_loss(model):
        function = f"{model.rpartition(':')[2]}_loss"
        tell(f"{model} has no function {function}; the loss is the mean of the squared output")


@contextmanager
def running(model: str) -> Iterator[None]:
    """Turn what the layers of a model of one's own raise into one line.

    Raises:
        ConfigError: they raised something.
    """
    try:
        yield
    except GpipeBenchError:
        raise
    except Exception as error:
        if not is_own(model):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        rule = f"--model must have layers that take what the ones before them give, got {model} with {reason}"
        raise ConfigError([f"{rule}; correct them"]) from error
