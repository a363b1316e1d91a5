"""Layers by their times: a CSV file with a line for each layer, which stands where a model is named.

    name,samples,forward_ms,backward_ms,backward_weights_ms,activation_mib,output_mib,parameter_mib
    embedding,4,0.3,0.6,0.6,24,24,154

Columns may stand in any order. ``forward_ms`` and ``backward_ms`` are needed, and all others may be left out.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

from gpipe_bench.errors import ConfigError
from gpipe_bench.models.spec import ModelSpec
from gpipe_bench.util.files import write_files
from gpipe_bench.util.nearest import nearest

_DAY_MS: Final = 86_400_000
_MOST_MIB: Final = 2**30
_MOST: Final = 10**9
_COUNTS: Final = ("samples", "parameters")
_NEEDED: Final = ("forward_ms", "backward_ms")
_SHOWN_PROBLEMS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayer:
    """What one layer takes for one micro-batch. Either all layers have a value, or all have None, which is unknown.

    Attributes:
        name: of the layer; it decides nothing.
        samples: of the micro-batch that was measured.
        forward_ms: milliseconds of the forward pass.
        backward_ms: milliseconds of the backward pass.
        backward_weights_ms: milliseconds of it that the gradients of the weights take. None: half of it.
        activation_mib: MiB that the forward pass makes and that stay until the backward pass. The output is part of
            them if the layer or the next one keeps it.
        output_mib: MiB that the next layer gets. None: a copy between devices takes the latency of their link alone.
        parameter_mib: MiB of trained parameters.
        parameters: how many there are, each of which takes the host time in an update. None: one.
        buffer_mib: MiB of frozen parameters and buffers.
    """

    name: str = ""
    samples: int | None = None
    forward_ms: float
    backward_ms: float
    backward_weights_ms: float | None = None
    activation_mib: float | None = None
    output_mib: float | None = None
    parameter_mib: float | None = None
    parameters: int | None = None
    buffer_mib: float | None = None


COLUMNS: Final = tuple(field.name for field in fields(MeasuredLayer))
"""Columns of a file of layers, in the order in which they are written."""


def is_layers(model: object) -> bool:
    """Whether something is a sequence of measured layers."""
    return isinstance(model, Sequence) and bool(model) and all(isinstance(layer, MeasuredLayer) for layer in model)


def is_layers_file(name: object) -> bool:
    """Whether a name of a model is that of a file of layers."""
    return isinstance(name, str) and name.endswith(".csv")


def checked_layers(layers: Sequence[MeasuredLayer]) -> tuple[MeasuredLayer, ...]:
    """The same layers.

    Raises:
        ConfigError: they are not as :class:`MeasuredLayer` describes; carries the first problems.
    """
    if problems := _problems(layers):
        raise ConfigError(problems)
    return tuple(layers)


def _problems(layers: Sequence[MeasuredLayer]) -> list[str]:
    values = [text for place, layer in enumerate(layers) for text in _value_problems(place, layer)]
    return (values or [*_shared_problems(layers)])[:_SHOWN_PROBLEMS]


def _shared_problems(layers: Sequence[MeasuredLayer]) -> Iterator[str]:
    if not layers:
        yield "layers must be one or more, got none; add a layer"
    for name in COLUMNS[1:]:
        unknown = [place for place, layer in enumerate(layers) if getattr(layer, name) is None]
        if 0 < len(unknown) < len(layers):
            yield f"{name} must be given for all layers or for none, got none for layer {unknown[0]}; add it"
    sizes = dict.fromkeys(layer.samples for layer in layers)
    if None not in sizes and len(sizes) > 1:
        yield f"samples must be the same for all layers, got {', '.join(map(str, sizes))}; measure one size"


def _value_problems(place: int, layer: MeasuredLayer) -> Iterator[str]:
    whole = layer.backward_ms, layer.backward_weights_ms
    for name in COLUMNS[1:]:
        value = getattr(layer, name)
        kind: Any = int if name in _COUNTS else int | float
        least = 1 if name == "samples" else 0
        most = _MOST if name in _COUNTS else _DAY_MS if name.endswith("_ms") else _MOST_MIB
        right = isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most
        if not right and (value is not None or name in _NEEDED):
            rule = f"{name} of layer {place} must be a {'whole ' * (kind is int)}number from {least} to {most}"
            yield f"{rule}, got {'none' if value is None else repr(value)}; correct it"
            whole = 0, 0
    if whole[1] is not None and whole[1] > whole[0]:
        rule = f"backward_weights_ms of layer {place} must be at most its backward_ms, {whole[0]:g}"
        yield f"{rule}, got {whole[1]:g}; it is the part of the weights"


def have_memory(layers: Sequence[MeasuredLayer]) -> bool:
    """Whether layers say anything about memory."""
    sizes = ("activation_mib", "parameter_mib", "buffer_mib")
    return any(getattr(layers[0], name) is not None for name in sizes)


def assumptions(layers: Sequence[MeasuredLayer], *, split: bool, several: bool) -> tuple[str, ...]:
    """What a simulation takes for values that layers do not have, a sentence each.

    Args:
        layers: measured ones; none for another model.
        split: whether backward passes are split into I and W.
        several: whether there are several partitions.
    """
    found = []
    if layers and several and layers[0].output_mib is None:
        found.append("copies take the latency of their link alone: the layers have no output_mib")
    if layers and split and layers[0].backward_weights_ms is None:
        found.append("each W takes half of its backward pass: the layers have no backward_weights_ms")
    if layers and have_memory(layers) and None in (layers[0].activation_mib, layers[0].parameter_mib):
        found.append("memory lacks a part: the layers must have both activation_mib and parameter_mib for all of it")
    return tuple(found)


def read_layers(path: str | Path) -> tuple[MeasuredLayer, ...]:
    """The layers of a CSV file, in the order of its lines.

    Raises:
        ConfigError: there is no such file, or it is not as :class:`MeasuredLayer` describes; names the first problems.
    """
    try:
        # Spreadsheets begin UTF-8 with a mark.
        text = Path(path).read_text(encoding="utf-8-sig")
        lines = [[field.strip() for field in line] for line in csv.reader(StringIO(text))]
    except OSError as error:
        rule = "layers must be a file that can be read"
        raise ConfigError([f"{rule}, got {str(path)!r}: {error.strerror or error}; correct it"]) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError([f"layers must be CSV in UTF-8, got {str(path)!r}: {error}; save it as such"]) from error
    header, *rows = [line for line in lines if any(line)] or [[]]
    problems = [*_header_problems(header)]
    for place, row in enumerate(rows):
        if not problems and len(row) != len(header):
            rule = f"layer {place} must have {len(header)} fields, as the header"
            problems.append(f"{rule}, got {len(row)}; write decimals with points, and fields between commas")
    layers: list[MeasuredLayer] = []
    if not problems:
        layers += [MeasuredLayer(**dict(zip(header, map(_value, header, row), strict=True))) for row in rows]
        problems = _problems(layers)
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems[:_SHOWN_PROBLEMS]])
    return tuple(layers)


def _header_problems(header: Sequence[str]) -> Iterator[str]:
    for name in _NEEDED:
        if name not in header:
            yield f"layers must have a column {name}, got {', '.join(header)[:60] or 'no header'}; add it to the header"
    for name in dict.fromkeys(header):
        if name not in COLUMNS:
            yield f"columns must be some of {', '.join(COLUMNS)}, got {name[:60]!r}; {nearest(name, COLUMNS)}"
        if header.count(name) > 1:
            yield f"columns must differ, got {name} {header.count(name)} times; leave one out"


def _value(name: str, text: str) -> Any:
    """A field as a number; a text that is none, to be refused, and None without text."""
    if name == "name":
        return text
    try:
        return None if not text else int(text) if name in _COUNTS else float(text)
    except ValueError:
        return text


def write_layers(path: str | Path, layers: Sequence[MeasuredLayer]) -> None:
    """Write a file that :func:`read_layers` reads, with the columns that the layers have.

    Raises:
        ConfigError: the layers are not what :class:`MeasuredLayer` describes.
        OutputError: the file cannot be written.
    """
    rows = [[value for value in astuple(layer) if value is not None] for layer in checked_layers(layers)]
    header = [name for name in COLUMNS if getattr(layers[0], name) is not None]
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_files({Path(path): text.getvalue()})


def layers_digest(path: str) -> str:
    """16 hexadecimal digits that change with the layers of a file.

    Raises:
        ConfigError: as :func:`read_layers`.
    """
    return hashlib.sha256(repr(read_layers(path)).encode()).hexdigest()[:16]


def layers_spec(path: str) -> ModelSpec:
    """A file of layers as a model that can be simulated, and does not run.

    Raises:
        ConfigError: as :func:`read_layers`.
    """
    count = len(read_layers(path))

    def refused(*_: object) -> NoReturn:
        rule = f"model must have layers that run, got their times in {path}"
        raise ConfigError([f"{rule}; name the model, or use simulate"])

    return ModelSpec(
        name=path,
        arguments=MappingProxyType({}),
        network=refused,
        layers=lambda _: count,
        input_shape=lambda _: (),
        loss=refused,
        batch=refused,
        source=f"the times in {path}",
    )
