"""``peers run`` and ``peers emulate``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gpipe_bench.bench.peers.contenders import contenders_of
from gpipe_bench.bench.peers.settings import QUICK, PeersSettings
from gpipe_bench.bench.spec.machine import find_machine
from gpipe_bench.bench.spec.validation import validated
from gpipe_bench.cli.progress import progress
from gpipe_bench.errors import ConfigError
from gpipe_bench.util.files import check_writable

if TYPE_CHECKING:
    from gpipe_bench.results.rows import Row

app = typer.Typer(help="Race the engine, other pipelines and the plain module, in turns.", no_args_is_help=True)

Set = Annotated[list[str] | None, typer.Option("--set", help="A setting, such as cells.rounds=30; may be repeated.")]


@app.command("run")
def run(
    out: Annotated[Path, typer.Option(help="Table of rows; its companions go beside it.")] = Path("results/peers.csv"),
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to race.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="A rehearsal of seconds; its numbers mean nothing.")] = False,
    changes: Set = None,
) -> None:
    """Run the race and write rows, timed steps and ratios; 35 to 45 minutes on two cores.

    A race that is cut off leaves its finished cases beside the table, and the same command goes on with them.
    """
    from gpipe_bench.bench.peers.kept import KeptCases, race_key
    from gpipe_bench.bench.peers.race import run_race
    from gpipe_bench.bench.peers.tables import write_race

    settings = _settings(changes, QUICK if quick else PeersSettings())
    check_writable(out)
    log = out.with_suffix(".log")
    log.write_text("", encoding="utf-8")
    machine = find_machine(device)
    kept = KeptCases(out.with_name(f"{out.stem}_cases.jsonl"), race_key(settings, machine), typer.echo)
    with progress("racing") as task:
        facts, raced = run_race(
            settings.cases(machine), contenders_of(settings.contenders), log=log,
            timeout_s=settings.timeout_s, probe_s=settings.probe_s, report=task.line, kept=kept, watch=task.step,
        )  # fmt: skip
    rows = write_race(raced, facts, settings.tolerance, out, settings.configuration)
    kept.remove()
    for name, reason in dict.fromkeys((row.contender, row.reason) for row in rows if row.reason):
        typer.echo(f"{name}: {reason}")
    typer.echo(f"wrote {out}")


@app.command("emulate")
def emulate(
    out: Annotated[Path, typer.Option(help="Table of rows.")] = Path("results/peers_emulated.csv"),
) -> None:
    """Run the engine, torchgpipe and fairscale on virtual P40s: the published ablation and speed of the U-Net.

    Kernels compute nothing and time is virtual; threads, autograd and allocations are those of the packages.
    """
    from gpipe_bench.bench.peers.emulated import emulated_cases, run_cases
    from gpipe_bench.bench.running.simulated import simulation_facts
    from gpipe_bench.bench.storage.tables import configurations_beside
    from gpipe_bench.emulator.build import obstacle
    from gpipe_bench.errors import UnsupportedError
    from gpipe_bench.results.rows import Row
    from gpipe_bench.results.tables import csv_text
    from gpipe_bench.util.files import write_files

    check_writable(out)
    if reason := obstacle():
        raise UnsupportedError(reason)
    cases = emulated_cases()
    rows = run_cases(cases, lambda own: typer.echo(_emulated(own)), simulation_facts())
    texts = {out: csv_text(Row.columns(), [row.to_dict() for row in rows])}
    write_files({**texts, **configurations_beside(out, [case.configuration for case in cases])})
    typer.echo(f"wrote {out}")


def _emulated(rows: Sequence[Row]) -> str:
    """The rows of one case in a line."""
    head = rows[0]
    what = f"{head.experiment:<10} {head.source or '?':<20} {head.variant:<12}"
    if head.status != "ok":
        return f"{what} {head.status}: {head.reason}"
    rates = [row.throughput_samples_per_s or 0.0 for row in rows]
    memory = f"{head.peak_reserved_gib or 0.0:.1f} GiB reserved"
    return f"{what} {median(rates):.1f} samples/s ({min(rates):.1f} to {max(rates):.1f}), {memory}"


def _settings(changes: list[str] | None, start: PeersSettings) -> PeersSettings:
    data: dict[str, Any] = start.model_dump(mode="json")
    for change in changes or []:
        path, found, text = change.partition("=")
        *sections, key = path.split(".")
        if not found or not key:
            raise ConfigError([f"--set must be like cells.rounds=30, got {change!r}; write section.key=value"])
        inner = data
        for section in sections:
            if not isinstance(inner.setdefault(section, {}), dict):
                raise ConfigError([f"--set must name a setting, got {path!r}; {section} has none"])
            inner = inner[section]
        inner[key] = _value(text)
    return validated(PeersSettings, data, lambda path: f"--set {'.'.join(path)}")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
