"""``judge``: engines on one suite of behaviours, with a verdict on each."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from gpipe_bench.errors import ConfigError
from gpipe_bench.results.configurations import digest
from gpipe_bench.results.rows import SCHEMA_VERSION
from gpipe_bench.results.schema import TABLES
from gpipe_bench.results.tables import lines_text
from gpipe_bench.util.files import check_writable, write_files
from gpipe_bench.util.nearest import nearest


def judge(  # noqa: PLR0917 - options, which have names on the command line
    engines: Annotated[list[str] | None, typer.Argument(help="NAME or NAME:SCHEDULE, as in pipelining:gpipe.")] = None,
    engine: Annotated[list[str] | None, typer.Option(help="A Python file with a function adapter(schedule).")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A behaviour. May be repeated.  [default: all]")] = None,
    seed: Annotated[int, typer.Option(help="Of the data.", min=0)] = 0,
    limit_s: Annotated[float, typer.Option(help="Seconds until a case counts as hanging.", min=0.1)] = 20.0,
    out: Annotated[Path | None, typer.Option(help="CSV file for the verdicts.")] = None,
) -> None:
    """Run engines on behaviours; exit status 1 where one is wrong, raises or hangs.

    Names are gpipe_bench, gpipe_bench_processes, torchgpipe, fairscale, pipelining, d9d, plain and reference.
    """
    from gpipe_bench.judge.behaviours import BEHAVIOURS
    from gpipe_bench.judge.runner import adapter_of, judged
    from gpipe_bench.measure.host import cpu_count, cpu_name, host_facts, machine_slug

    chosen = [*(engines or ()), *(engine or ())]
    problems = [
        f"behaviour must be one of {', '.join(BEHAVIOURS)}, got {name!r}; {nearest(name, BEHAVIOURS)}"
        for name in only or ()
        if name not in BEHAVIOURS
    ]
    if not chosen:
        problems.append("judge must be given an engine, got none; write gpipe_bench, or --engine my_adapter.py")
    if problems:
        raise ConfigError(problems)
    check_writable(out, inputs=chosen)
    versions = {name: adapter_of(name).version for name in chosen}
    rows = [list(TABLES["judge"].columns)]
    profile, failed = machine_slug(cpu_name(), cpu_count()), False
    for name in chosen:
        counts: dict[str, int] = {}
        configuration = json.dumps({"engine": name, "seed": seed, "limit_s": limit_s}, sort_keys=True)
        origin = host_facts() | {
            "engine": name, "version": versions[name], "seed": seed, "evidence": "measured", "profile": profile,
            "config_sha256": digest(configuration), "schema_version": SCHEMA_VERSION,
        }  # fmt: skip
        typer.echo(f"{name} {versions[name]}")
        for behaviour, verdict in judged(name, only or BEHAVIOURS, seed, limit_s):
            counts[verdict.kind] = counts.get(verdict.kind, 0) + 1
            found = {
                "behaviour": behaviour, "verdict": verdict.kind, "setting": verdict.setting, "detail": verdict.detail,
            }  # fmt: skip
            cells = ((origin | found)[column] for column in TABLES["judge"].columns)
            rows.append(["" if cell is None else str(cell) for cell in cells])
            if verdict.kind != "ok":
                typer.echo(f"  {behaviour:<22} {verdict.kind:<7} {verdict.setting}")
                typer.echo(f"    {verdict.detail}"[:79])
            if verdict.kind not in ("ok", "limit"):
                failed = True
                typer.echo(f"    again: gpipe-bench judge {quote(name)} --only {behaviour!r} --seed {seed}")
        typer.echo("  " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if out is not None:
        write_files({out: lines_text(rows)})
        typer.echo(f"wrote {out}")
    if failed:
        raise typer.Exit(1)
