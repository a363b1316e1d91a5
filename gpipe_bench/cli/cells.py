"""Cells of commands: the settings of one as options, or several in a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from itertools import count
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_args

import typer

from gpipe_bench.cli.options import VALUES, complete, values_words
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.labels import autograd_words, run_as, training_words
from gpipe_bench.settings import setting_of
from gpipe_bench.suite.cell_files import CellT, read_cells
from gpipe_bench.suite.settings import Section
from gpipe_bench.suite.validation import validated

if TYPE_CHECKING:
    from gpipe_bench.cli.progress import Progress
    from gpipe_bench.results.rows import Row

SectionT = TypeVar("SectionT", bound=Section)
_PLAIN: Final = (bool, int, float)

CellFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Take cells from a JSON file, the settings of each by its name; or, with --profile, measured ones from "
        "their table of rows.",
    ),
]
Only = Annotated[
    str, typer.Option(metavar="NAME", help="Names of cells in that file, joined by ','.  [default: all of this kind]")
]
Timelines = Annotated[
    str, typer.Option(metavar="NAME", help="Names of cells in that file whose timelines are kept, joined by ','.")
]
RawOut = Annotated[Path | None, typer.Option(help="Raw results to write, a JSON file; for a file of cells.")]


def with_settings(
    kind: type[Section], *, start: Mapping[str, Any] | None = None, without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each setting of ``kind``; it takes those that were given as ``options``, by name.

    Args:
        kind: cells, or a section of the configuration.
        start: defaults of the command, as the help shows them, where they are not those of ``kind``.
        without: settings that get no option.
    """
    shown = {**kind().model_dump(mode="json"), **(start or {})}
    names = [name for name in kind.model_fields if name not in without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**values: Any) -> None:
            options = {name: values.pop(name) for name in names}
            command(options={name: value for name, value in options.items() if value is not None}, **values)

        # Typer makes options of a function's parameters, which it reads in these two places, and of no fields of a
        # model (fastapi/typer#111).
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name != "options"]
        added = [_option(kind, name, shown[name]) for name in names]
        called.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
        return called

    return decorate


def _option(kind: type[Section], name: str, shown: Any) -> inspect.Parameter:
    field = kind.model_fields[name]
    setting = setting_of(field)
    if setting is None:
        raise TypeError(f"{name} of {kind.__name__} must be declared with a Setting, got none; add one")
    kinds = get_args(field.annotation)
    annotation = next(one for one in kinds if one is not NoneType) if NoneType in kinds else field.annotation
    values = (lambda: setting.names) if setting.names else VALUES.get(name)
    word = "none" if shown is None else str(shown).lower() if isinstance(shown, bool) else str(shown)
    said = f"{setting.help}{values_words(values())}" if values else setting.help
    text = f"{said}.  [default: {word}]" if word else f"{said}."
    option = typer.Option(help=text, autocompletion=complete(values) if values else None)
    plain: Any = annotation if annotation in _PLAIN else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[plain | None, option]
    )


def option_name(path: tuple[str, ...]) -> str:
    """What a setting is called on the command line."""
    return f"--{path[0].replace('_', '-')}"


def from_options(kind: type[SectionT], options: Mapping[str, Any]) -> SectionT:
    """The settings that options give; others have their defaults.

    Raises:
        ConfigError: options are wrong; carries all problems.
    """
    return validated(kind, options, option_name)


def from_file(kind: type[CellT], file: Path, only: str, options: Mapping[str, Any]) -> list[CellT]:
    """The cells of a file that a command was told to take, none twice.

    Raises:
        ConfigError: the file, a cell or a name is wrong, or options name settings, too; carries all problems.
    """
    if wrong := options.keys() - {"profile", "launch_us"}:
        names = ", ".join(option_name((name,)) for name in sorted(wrong))
        raise ConfigError([f"options of a cell must be left out with --cells, got {names}; leave one of both out"])
    from_options(kind, options)
    cells = read_cells(file, kind, names_in(only), **options)
    return list({cell.id: cell for cell in cells}.values())


def check_unused(where: str, **options: object) -> None:
    """Refuse options that would do nothing.

    Args:
        where: ``with --cells`` or the like.
        options: by name; those that were given are true.

    Raises:
        ConfigError: some were given.
    """
    if wrong := [option_name((name,)) for name, value in options.items() if value]:
        names, them = ", ".join(wrong), "it" if len(wrong) == 1 else "them"
        raise ConfigError([f"options that do nothing {where} must be left out, got {names}; leave {them} out"])


def names_in(text: str) -> list[str]:
    """Names that are joined by commas; ``none`` and an empty text are no name."""
    return [name for name in text.split(",") if name not in ("", "none")]


def needed_out(out: Path | None) -> Path:
    """Where raw results go.

    Raises:
        ConfigError: nowhere.
    """
    if out is None:
        raise ConfigError(["--out must be given with --cells, got none; name a JSON file"])
    return out


def teller(task: Progress, total: int) -> Callable[[Row], None]:
    """Prints each row as it is made."""
    steps = count(1)

    def say(row: Row) -> None:
        task.line(row_words(row))
        task.step(next(steps), total)

    return say


def row_words(row: Row) -> str:
    """A simulated or emulated row on a line."""
    what = f"n={row.partitions} m={row.chunks} batch={row.batch_size} {row.checkpoint} {row.variant} {run_as(row)}"
    what += f", {training_words(row)}" if training_words(row) else ""
    value = f"{row.throughput_samples_per_s:.2f} samples/s" if row.throughput_samples_per_s else row.reason
    return f"{row.evidence}, {row.status}: {what}{autograd_words(row)}: {value}"
