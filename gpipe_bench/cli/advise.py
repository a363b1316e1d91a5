"""``advise``: balance, chunks, checkpoint mode and schedule for a model on a hardware profile."""

from __future__ import annotations

import json
import textwrap
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpipe_bench.cli.cells import from_options, with_settings
from gpipe_bench.cli.options import HOST_BOUND, Processes, model_file, stem, tell_layers, tell_loss, use_words
from gpipe_bench.cli.progress import progress
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.labels import run_as
from gpipe_bench.suite.advice.advice import AdviceRequest
from gpipe_bench.util.files import check_writable, write_files

if TYPE_CHECKING:
    from gpipe_bench.results.rows import Row
    from gpipe_bench.suite.advice.advice import Advice
    from gpipe_bench.suite.storage.raw import RawResult
    from gpipe_bench.util.console import Grid

_TITLE: Final = "recommended, and the best of each other choice; GiB of the fullest device"
_WIDTH: Final = 80
_SCREEN: Final = 24
_OTHERS: Final = 5
"""Lines of the screen that are no text and no other choice: a blank, title, headings, the best, how to see more."""
_FEWEST: Final = 5
"""Other choices that are listed at least: one of each kind."""
_CHOICE: Final = 24
"""Letters of a choice beside its numbers."""
_BLANK: Final = "\N{NO-BREAK SPACE}"


@with_settings(AdviceRequest)
def advise(
    *,
    options: dict[str, Any],
    request: Annotated[str, typer.Option(hidden=True, help="The same settings as JSON, for the workflow.")] = "{}",
    processes: Processes = 1,
    rows: Annotated[Path | None, typer.Option(help="Write all that was tried as a table, a CSV file.")] = None,
    figure: Annotated[Path | None, stem("Draw it: path without suffix; needs --rows.")] = None,
    whole: Annotated[bool, typer.Option("--all", help="List every choice, with where the time goes.")] = False,
    schedule_csv: Annotated[Path | None, typer.Option(help="Write the schedule of the best, a CSV file.")] = None,
) -> None:
    """Recommend a balance, chunks, a checkpoint mode and a schedule, and say what other choices cost.

    Everything is simulated; no device is needed. Takes seconds for a small model, half a minute for eight devices, and
    minutes for 64. --schedules none is faster: only the paper's executor is tried then. Exit status 1 when nothing fits
    the memory.
    """
    asked = from_options(AdviceRequest, {**_settings(request), **options})
    if figure is not None and rows is None:
        raise typer.BadParameter("--figure is drawn from a table and needs --rows")
    drawn = None if figure is None else figure.with_name(f"{figure.name}.svg")
    check_writable(rows, drawn, schedule_csv, inputs=[model_file(asked.model), asked.profile])
    tell_layers(asked.model, asked.model_args)
    tell_loss(asked.model)
    from gpipe_bench.suite.advice.advice import advise as find

    with progress("simulating") as task:
        advice = find(asked, task.step, processes)
    _print(advice, whole=whole)
    if rows is not None:
        from gpipe_bench.suite.evaluation.collect import write_tables

        write_tables(advice.results, rows.stem, rows)
        typer.echo(f"wrote {rows} and its companions")
    if figure is not None and rows is not None:
        from gpipe_bench.figures.advice import ADVICE

        typer.echo(f"wrote {', '.join(map(str, ADVICE.draw(rows, figure)))}")
    if advice.best is None:
        raise typer.Exit(1)
    if schedule_csv is not None:
        from gpipe_bench.schedules import named_schedule, to_csv

        row = advice.best.row
        made = named_schedule(row.schedule, row.microbatches or 1, row.partitions or 1, row.device_count or 1)
        write_files({schedule_csv: to_csv(made)})
        typer.echo(f"wrote {schedule_csv}")


def _settings(request: str) -> dict[str, Any]:
    try:
        return {**json.loads(request)}
    except (ValueError, TypeError):
        raise ConfigError([f"--request must be a JSON object of settings, got {request[:80]!r}; correct it"]) from None


def _print(advice: Advice, *, whole: bool) -> None:
    """The answer on a screen, or with ``whole`` every choice and where the time goes."""
    from gpipe_bench.models.table import format_arguments, parse_arguments
    from gpipe_bench.suite.published.known_errors import error_words
    from gpipe_bench.util.console import output

    console = output()
    best, request = advice.best, advice.request
    arguments = format_arguments(parse_arguments(request.model, request.model_args))
    what = f"{request.model} ({arguments or 'no arguments'}), batch {request.batch_size}"
    where = f"{request.devices} x {request.profile}"
    where += f" in {request.hosts} hosts over {request.network}" if request.hosts > 1 else ""
    where += use_words(request.tf32, request.launch_us)
    what += "".join(f", {name}" for name in (request.precision, request.optimizer) if name not in ("float32", "sgd"))
    lines = _wrapped(f"{what}; simulated on up to {where}, {advice.limit_gib:.1f} GiB each")
    if request.memory_limit_gib > advice.limit_gib:
        asked = f"--memory-limit-gib {request.memory_limit_gib:g} is more than a {request.profile} has for tensors"
        lines += _wrapped(f"{asked}: {advice.limit_gib:.1f} GiB hold")
    if best is None:
        least = min(advice.results, key=lambda result: result.needed_gib or float("inf"))
        said = [*lines, "nothing fits the memory; the least that was asked for:", *_wrapped(least.row.reason)]
        console.print("\n".join(said))
        return
    row = best.row
    lines += _wrapped(
        f"recommended: {row.device_count} device{'s' * (row.device_count != 1)}, balance {row.balance}, "
        f"chunks {row.chunks}, checkpoint {row.checkpoint}{f', {run_as(row)}' if request.schedules else ''}: "
        f"{row.throughput_samples_per_s:.1f}{_BLANK}samples/s{_BLANK}simulated"
    )
    lines += _wrapped(error_words(request.profile))
    notes = [*best.caveats, *([HOST_BOUND] if best.bound_by_host else [])]
    if (spread := advice.spread) and (ideal := advice.ideal_samples_per_s):
        speed = spread.row.throughput_samples_per_s or 0.0
        where = f"{spread.row.device_count} devices of {request.hosts_of(spread.row.device_count or 1)} hosts"
        cost = f"{1 - speed / ideal:.1%}: {speed:.1f} samples/s, and {ideal:.1f} with one that takes no time"
        notes.append(f"on {where} the network costs {cost}")
    if other := advice.runner_up:
        ratio = (row.throughput_samples_per_s or 0.0) / (other.row.throughput_samples_per_s or 1.0)
        notes.append(f"{ratio - 1:.1%} faster than {run_as(other.row)}, the best with another schedule")
    for note in map(_wrapped, notes):
        lines += note if whole or len(lines) + len(note) <= _SCREEN - _OTHERS - _FEWEST else []
    if whole and other:
        lines += [f"of the time {run_as(one)}: {_split(one)}" for one in (row, other.row)]
    console.print("\n".join(lines), soft_wrap=True)
    choices = advice.alternatives()
    shown = choices if whole else _leading(choices, _SCREEN - len(lines) - _OTHERS)
    console.print(_table(shown, best, whole=whole))
    if not whole:
        console.print(f"{len(choices) - len(shown)} more choices, and where the time goes: add --all")


def _wrapped(text: str) -> list[str]:
    """The lines of a sentence; those after the first are indented."""
    return [line.replace(_BLANK, " ") for line in textwrap.wrap(text, _WIDTH, subsequent_indent="  ")]


def _leading(choices: list[tuple[str, RawResult]], most: int) -> list[tuple[str, RawResult]]:
    """The fastest of each kind of choice, then the second ones, as many as there is room for, in their order."""
    kinds: dict[str, list[int]] = {}
    for place, (name, _) in enumerate(choices):
        kinds.setdefault(name.split()[0], []).append(place)
    for places in kinds.values():
        places.sort(key=lambda place: -(choices[place][1].row.throughput_samples_per_s or 0.0))
    turns = [place for turn in zip_longest(*kinds.values()) for place in turn if place is not None]
    return [choices[place] for place in sorted(turns[: max(most, _FEWEST)])]


def _split(row: Row) -> str:
    """Where the time of a step goes, on the mean of the devices."""
    idle = {name: getattr(row, f"{name}_fraction") or 0.0 for name in ("recompute", "copy", "imbalance", "bubble")}
    return ", ".join(f"{share:.0%} {name}" for name, share in {"compute": 1 - sum(idle.values()), **idle}.items())


def _table(choices: list[tuple[str, RawResult]], best: RawResult, *, whole: bool) -> Grid:
    from gpipe_bench.util.console import Column, Grid

    settings = [Column("choice", text=True), *map(Column, ("devices", "chunks")), Column("checkpoint", text=True)]
    values = ("samples/s", "cost", "GiB", *(("recompute", "bubble", "imbalance") if whole else ()))
    table = Grid([*settings, *map(Column, values)], f"\n{_TITLE}")
    rows = [("recommended", best), *choices]
    for name, result in rows:
        words = _cells(name if whole else _brief(name), result, best)
        table.add(*words[: len(table.columns)], style="bold" if result is best else "")
    return table


def _brief(name: str) -> str:
    """A choice in a column's width; a schedule is known by its name."""
    name = name.removeprefix("schedule ")
    return name if len(name) <= _CHOICE else f"{name[: _CHOICE - 1]}…"


def _cells(name: str, result: RawResult, best: RawResult) -> list[str]:
    row, speed = result.row, result.row.throughput_samples_per_s
    setting = [name, str(row.device_count), str(row.chunks), row.checkpoint]
    if speed is None:
        # It stands for all of its kind that were tried; a balance for itself.
        unfit = "no fit" if name.startswith("balance") else "none fits"
        return [*setting, unfit if row.status == "oom" else row.status, "", *[""] * 4]
    fullest = max((record["peak_reserved_gib"] or 0.0 for record in result.devices), default=0.0)
    reference: Any = best.row.throughput_samples_per_s
    shares = [f"{getattr(row, f'{share}_fraction') or 0.0:.0%}" for share in ("recompute", "bubble", "imbalance")]
    cost = "" if result is best else f"{speed / reference - 1:+.1%}"
    return [*setting, f"{speed:.1f}", cost, f"{fullest:.1f}", *shares]
