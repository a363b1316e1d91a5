"""``simulate-published``, ``collect``, ``table``, ``trace``: from raw results to what people read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gpipe_bench.cli.options import named
from gpipe_bench.data import PUBLISHED_FOLDER
from gpipe_bench.results.catalogue import PUBLISHED_ROWS

if TYPE_CHECKING:
    from gpipe_bench.results.rows import Row

_NAMED: Final = 5
_TABLE_COLUMNS: Final = (
    *("experiment", "evidence", "model", "model_args", "variant", "partitions", "chunks", "batch_size"),
    *("repeat", "status", "reason", "throughput_samples_per_s", "device"),
)


def collect(
    raw: Annotated[list[Path], typer.Argument(help="Raw results, as run wrote them.")],
    experiment: Annotated[str, typer.Option(help="Name of the experiment, written into each row.")],
    out: Annotated[Path, typer.Option(help="Table of rows; companions _devices, _steps and _events lie beside it.")],
    published: Annotated[
        Path | None, typer.Option(help="Folder of published values; those of the same settings become rows too.")
    ] = None,
    cells: Annotated[
        str, typer.Option(help="Digests of the simulated and emulated cells to take, joined by ','; none: all.")
    ] = "none",
) -> None:
    """Join raw results into a table of rows and its companions; failed runs are named on stderr."""
    from gpipe_bench.suite.evaluation.collect import collect as join
    from gpipe_bench.util.files import check_writable

    check_writable(out, inputs=raw)
    rows = join(raw, experiment, out, published, [word for word in cells.split(",") if word not in ("", "none")])
    failed = [row for row in rows if row.status in ("oom", "error", "skipped") and row.evidence != "published"]
    for row in failed[:_NAMED]:
        run = row.evidence if row.evidence in ("simulated", "emulated") else f"repeat {row.repeat}"
        typer.echo(f"{row.status}: {row.variant} n={row.partitions} m={row.chunks} {run}: {row.reason}", err=True)
    if len(failed) > _NAMED:
        typer.echo(f"and {len(failed) - _NAMED} more that failed; the table has their reasons", err=True)
    typer.echo(f"wrote {out} with {len(rows)} rows, and its companions")


def published(
    out: Annotated[Path, typer.Option(help="Table of rows to write.")] = PUBLISHED_ROWS,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of published values.  [default: results/reference/published]")
    ] = None,
) -> None:
    """Write the published values as rows like all others, so that figures can stand them beside simulated ones."""
    from gpipe_bench.results.labels import rows_text
    from gpipe_bench.suite.published.values import published_rows
    from gpipe_bench.util.files import check_writable, write_files

    check_writable(out)
    rows = published_rows(folder or PUBLISHED_FOLDER)
    write_files({out: rows_text(rows)})
    typer.echo(f"wrote {out} with {len(rows)} rows")


def simulate_published(
    table: Annotated[str, typer.Argument(help="A published table, such as unet-speed.")],
    out: Annotated[Path, typer.Option(help="The raw results to write, one JSON file.")],
) -> None:
    """Simulate the rows of a published table on the hardware and with the settings that they were run with."""
    from gpipe_bench.cli.cells import row_words
    from gpipe_bench.cli.progress import progress
    from gpipe_bench.suite.published.simulations import simulate_table
    from gpipe_bench.suite.storage.raw import results_json
    from gpipe_bench.util.files import check_writable, write_files

    check_writable(out)
    with progress(f"simulating {table}") as task:
        results = simulate_table(table, lambda row: task.line(row_words(row)))
    write_files({out: results_json(results)})
    typer.echo(f"wrote {out} with {len(results)} simulated rows")


def table(
    rows: Annotated[Path, typer.Option(help="Table of rows, as collect wrote it.")],
    brief: Annotated[
        bool, typer.Option("--brief", help="The published variants by kind of evidence alone, and what to open.")
    ] = False,
) -> None:
    """Print variants with repeats, medians, 95 % intervals, ratios, memory, shares of time and failures."""
    from gpipe_bench.errors import ConfigError
    from gpipe_bench.figures.tables import is_race, read_rows
    from gpipe_bench.suite.evaluation.summary import print_summary, result_files

    if is_race(rows):
        other = "the study of peers draws it, and `compare` compares two of them"
        raise ConfigError([f"rows must be those of an experiment, got the race of peers in {rows}; {other}"])
    known = read_rows(rows, _TABLE_COLUMNS)
    if brief:
        _print_answer(known, rows)
    else:
        print_summary(known, result_files(rows))


def _print_answer(known: list[Row], rows: Path) -> None:
    from textwrap import wrap

    from gpipe_bench.components import PUBLISHED
    from gpipe_bench.report.tables import answers
    from gpipe_bench.results.outcomes import SCATTER, group_rows
    from gpipe_bench.util.console import Column, Grid, command_lines, output, short_path

    found = answers(known)
    if not found:
        published = ", ".join(PUBLISHED)
        typer.echo(f"No answer: these rows do not compare {published},\nnor ways to run on a CPU.\n")
    for answer in found:
        kinds = [f"{evidence.text}\n{where.text}" for evidence, where, *_ in answer.lines]
        cells = [[_parts(field.text) for field in line[2:]] for line in answer.lines]
        if len(kinds) == 1:
            names, title = (
                ["samples/s", "over the first", "memory"],
                f"{answer.title}; {kinds[0].replace(chr(10), ': ')}",
            )
            lines = [[speed.removesuffix(" samples/s"), *rest] for speed, *rest in cells[0]]
        else:
            # One line of 80 columns per variant: units, and the devices if they are the same ones, stand above.
            places = dict.fromkeys(where.text.rpartition(", PyTorch")[0] for _, where, *_ in answer.lines)
            names = [f"{kind.split()[0]}\nPyTorch {kind.split()[-1]}" for kind in kinds] if len(places) == 1 else kinds
            title = f"{' and '.join(places)}\nsamples/s, over the first, GiB of all devices"
            lines = [[_short(cell) for cell in own] for own in zip(*cells, strict=True)]
        grid = Grid([Column("", text=True), *(Column(name, text=True) for name in names)], title, keys=1)
        for name, line in zip(answer.header[2:], lines, strict=True):
            grid.add(name, *line)
        output().print(grid)
        typer.echo("\n".join([*wrap(answer.note, width=80), ""]))
    measured = [group for group in group_rows(known) if group.head.evidence == "measured"]
    if noisy := [one.variant for group in measured for one in group.ordered() if group.noisy(one)]:
        ratios = "ratio's interval is" if len(noisy) == 1 else "ratios' intervals are"
        typer.echo(f"{len(noisy)} noisy {ratios} wider than {SCATTER:.0%}: measure again while nothing")
        typer.echo("else runs, or see results/reference/measured. The other ratios stand.\n")
    if figures := sorted((rows.parent.parent / "figures").glob(f"{rows.stem}*.png")):
        typer.echo("Look at:    " + "\n            ".join(map(short_path, figures)))
    width, results = output().width, ("--results", short_path(rows.parent))
    table, report = ["gpipe-bench", "table"], ["gpipe-bench", "report"]
    typer.echo(command_lines("Everything: ", table, ("--rows", short_path(rows)), width=width))
    typer.echo(command_lines("One page:   ", report, results, ("--out", "report.html"), width=width))


def _parts(text: str) -> list[str]:
    """Throughput, its ratio and memory of a field of the answer; what happened instead stands for the first."""
    speed, *rest = text.split("\n")
    return [speed, *([""] if len(rest) == 1 else []), *rest, *([] if rest else ["", ""])]


def _short(cell: list[str]) -> str:
    speed, ratio, memory = cell
    return " ".join(filter(None, [speed.removesuffix(" samples/s"), ratio, memory.partition(" ")[0]]))


def trace(
    events: Annotated[Path, typer.Option(help="Table of timeline events, <experiment>_events.csv.")],
    variant: Annotated[str, named("variant", "Label of the components, such as dep-str-ptl.")],
    out: Annotated[Path, typer.Option(help="The Chrome trace to write, a JSON file.")],
    rows: Annotated[
        Path | None, typer.Option(help="Table of rows of the same runs.  [default: <experiment>.csv beside the events]")
    ] = None,
    evidence: Annotated[str, named("evidence", "Kind of run to show: measured, emulated or simulated.")] = "measured",
) -> None:
    """Write one step of one variant as a Chrome trace, which Perfetto opens (ui.perfetto.dev).

    A variant that failed, or is unsupported here, gives an empty trace with the reason.
    """
    from gpipe_bench.figures.runs import choose_run
    from gpipe_bench.figures.tables import read_events, read_rows
    from gpipe_bench.results.timeline import write_trace
    from gpipe_bench.util.files import check_writable

    table = rows or events.with_name(events.name.replace("_events", "", 1))
    check_writable(out, inputs=[events, table])
    run = choose_run(read_events(events), read_rows(table, _TABLE_COLUMNS), variant, evidence)
    write_trace(out, variant, run.row, run.events, run.remark)
    typer.echo(f"wrote {out}" + (f" ({run.remark})" if run.remark else ""))
