"""The settings of a pipeline: what each one is for, which values it has, and what is said of every other value.

    chunks: Chunks = 1                           declares a setting, in a request, a cell or a configuration
    chunks = checked("chunks", Chunks, chunks)   checks an argument; pydantic checks plain data by the same Setting

What engine, simulator, emulator, cells and command line share is declared here. What only simulations and emulations
have stands in :mod:`gpipe_bench.step.request`, and what only cells have in :mod:`gpipe_bench.suite`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral
from types import NoneType
from typing import Annotated, Any, Final, get_args

from gpipe_bench.components import Components
from gpipe_bench.util.nearest import nearest

Reader = Callable[[Any], Any]
"""The value as the package keeps it; a ValueError says ``must be <rule>, got <value>; <what to change>``."""


@dataclass(frozen=True, eq=False)
class Setting:
    """What a setting is for, and the rule of its values; it stands in the ``Annotated`` type of the setting.

    Attributes:
        help: what it is for, in the command line's help and in the schema of a configuration.
        read: reads an argument of Python.
        schema: its JSON schema, but for None.
        read_plain: reads the value that a command line or a file has; by default as ``read``.
        names: all of its values, where it is one of some names.
        error: what an argument with another value raises.
    """

    help: str
    read: Reader
    schema: Mapping[str, Any] = field(default_factory=dict)
    read_plain: Reader | None = None
    names: tuple[str, ...] = ()
    error: type[Exception] = ValueError

    def plain(self, value: Any) -> Any:
        """The value that a command line or a file has, as the package keeps it."""
        return (self.read_plain or self.read)(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Let pydantic read values as this setting does."""
        from pydantic_core import core_schema

        optional = NoneType in get_args(source)
        return core_schema.no_info_before_validator_function(
            lambda value: None if optional and value is None else self.plain(value), handler(source)
        )

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """The JSON schema of the values, with the help."""
        null = {"type": "null"}
        optional = null in handler(core).get("anyOf", ()) and "anyOf" not in self.schema
        return {**({"anyOf": [self.schema, null]} if optional else self.schema), "description": self.help}


def setting_of(declared: Any) -> Setting | None:
    """The setting of a type such as :data:`Chunks`, or of a field that pydantic made of one; None if there is none."""
    given = [declared, *get_args(declared)]
    known: list[Any] = [getattr(one, "metadata", None) or getattr(one, "__metadata__", ()) for one in given]
    return next((one for some in known for one in some if isinstance(one, Setting)), None)


def checked(name: str, declared: Any, value: Any, error: type[Exception] | None = None) -> Any:
    """The value of an argument as the package keeps it.

    Args:
        name: of the argument.
        declared: its type, such as :data:`Chunks`.
        value: the value that the caller gave.
        error: what to raise; None: that of the setting.

    Raises:
        ValueError: the value breaks the rule of the setting.
        TypeError: the setting takes values of one type.
    """
    setting = setting_of(declared)
    optional = NoneType in (*get_args(declared), *get_args(getattr(declared, "__origin__", None)))
    if setting is None or (optional and value is None):
        return value
    try:
        return setting.read(value)
    except ValueError as wrong:
        raise (error or setting.error)(f"{name} {wrong}") from None


def shown(value: object) -> str:
    """A value in few words; of one with a long text its type."""
    text = repr(value) if isinstance(value, str | int | float | list | tuple | None) else ""
    return text if 0 < len(text) <= 60 else f"a value of type {type(value).__name__}"


def is_whole(value: object, least: int = 1) -> bool:
    """Whether a value is a whole number of any integral type, such as NumPy's; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def whole(purpose: str, least: int = 1, most: int | None = None) -> Setting:
    """A whole number; ``most`` is for plain data, where a slip shall end in a sentence, and not in a full memory."""

    def read(value: Any) -> int:
        if not is_whole(value, least):
            raise ValueError(f"must be a whole number of at least {least}, got {shown(value)}; use {least} or more")
        return int(value)

    def read_plain(value: Any) -> int:
        if most is not None and read(value) > most:
            raise ValueError(f"must be at most {most}, got {shown(value)}; lower it")
        return read(value)

    limits = {"minimum": least} | ({} if most is None else {"maximum": most})
    return Setting(purpose, read, {"type": "integer", **limits}, read_plain)


def whole_numbers(purpose: str, example: str, least: int = 1, shortest: int = 1) -> Setting:
    """A list of whole numbers, as many as ``shortest`` or more."""

    def read(value: Any) -> list[int]:
        numbers: Sequence[Any] = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [None]
        if len(numbers) < shortest or not all(is_whole(one, least) for one in numbers):
            rule = f"must be a list of whole numbers of at least {least}"
            raise ValueError(f"{rule}, got {shown(value)}; use e.g. {example}")
        return [int(one) for one in numbers]

    return Setting(purpose, read)


def instance(purpose: str, kinds: Any, rule: str, advice: str) -> Setting:
    """An object of Python, of one of some classes; plain data has none."""

    def read(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise ValueError(f"must be {rule}, got {shown(value)}; {advice}")  # noqa: TRY004 - as Reader
        return value

    return Setting(purpose, read, error=TypeError)


def choice(purpose: str, names: tuple[str, ...]) -> Setting:
    """One of some names."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            rule = f"must be one of {', '.join(names)}"
            raise ValueError(f"{rule}, got {shown(value)}; {nearest(str(value), names)}")
        return value

    return Setting(purpose, read, schema={"type": "string", "enum": [*names]}, names=names)


def switch(purpose: str) -> Setting:
    """True or False."""

    def read(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be True or False, got {shown(value)}; use one of them")  # noqa: TRY004 - as Reader
        return value

    return Setting(purpose, read, {"type": "boolean"}, error=TypeError)


def number(purpose: str, most: float, unit: str, *, zero: bool = False) -> Setting:
    """A number above 0, or from 0 on if ``zero`` is one of them."""

    def read(value: Any) -> float:
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not (0 < value <= most or (zero and value == 0)):
            rule = f"must be {'at least' if zero else 'more than'} 0 and at most {most}"
            raise ValueError(f"{rule}, got {shown(value)}; use {unit}")
        return float(value)

    def read_plain(value: Any) -> float:
        # YAML reads 1e3 as text.
        with suppress(ValueError):
            value = float(value) if isinstance(value, str) else value
        return read(value)

    limits = {"minimum" if zero else "exclusiveMinimum": 0, "maximum": most}
    return Setting(purpose, read, {"type": "number", **limits}, read_plain)


def any_text(purpose: str) -> Setting:
    """Any text."""

    def read(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be text, got {shown(value)}; put it in quotes")  # noqa: TRY004 - as Reader
        return value

    return Setting(purpose, read, {"type": "string"}, error=TypeError)


CHECKPOINT_MODES: Final = ("always", "except_last", "never")
TRANSFERS: Final = ("direct", "host")
WORKERS: Final = ("always", "never")
FLAVOURS: Final = ("current", "published")
OPTIMIZERS: Final = ("sgd", "momentum", "rmsprop", "adam", "adamw")
PRECISIONS: Final = ("float32", "float16", "bfloat16")
"""The first leaves the model's own types."""
HALVES: Final = PRECISIONS[1:]
"""Those of 16 bits."""
BACKWARDS: Final = ("autograd", "scheduled")
"""What orders the backward pass: autograd without a schedule, and a schedule if there is one."""

BatchSize = Annotated[int, whole("samples per step", most=10**9)]
Chunks = Annotated[int, whole("micro-batches per step", most=65_536)]
Partitions = Annotated[int, whole("contiguous groups of layers, each with a worker of its own", most=4096)]
LayerCounts = Annotated[Sequence[int], whole_numbers("layers per partition", "[2, 2]")]
DeviceNumbers = Annotated[Sequence[int], whole_numbers("number of each device", "[0, 0, 1, 1]", 0, 0)]
Checkpoint = Annotated[str, choice("micro-batches whose activations are recomputed", CHECKPOINT_MODES)]
Transfer = Annotated[str, choice("how tensors cross partitions: direct, or host for pinned memory", TRANSFERS)]
Workers = Annotated[str, choice("whether threads of their own issue the work of partitions", WORKERS)]
Switches = Annotated[
    Components,
    instance(
        "which components of the engine are on",
        Components,
        "a gpipe_bench.Components",
        "write Components(portals=False), or Components.from_label('dep-str-x')",
    ),
]
DefersBatchNorm = Annotated[bool, switch("whether batch normalization updates its statistics once per batch")]

Warmup = Annotated[int, whole("untimed steps before the timed ones", 0, 10**6)]
Steps = Annotated[int, whole("timed steps of each repeat", most=10**6)]
# PyTorch takes 64 bits; a row's column is a signed integer.
Seed = Annotated[int, whole("seed of weights, data and dropout", 0, 2**63 - 1)]
Threads = Annotated[int, whole("CPU threads inside one operator", most=4096)]
Processes = Annotated[int, whole("processes: 1, or one for each device of the schedule", most=4096)]
Hosts = Annotated[int, whole("hosts that have the devices, as many each", most=4096)]
