"""``schedule simulate``, ``emulate`` and ``run``: one step of a schedule, each action beside its prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpipe_bench.bench.spec.settings import read_balance
from gpipe_bench.bench.spec.simulated_cells import SimulatedCell
from gpipe_bench.cli.options import HOST_BOUND, VALUES, complete, stem, use_words
from gpipe_bench.cli.progress import progress
from gpipe_bench.cli.schedule_source import Devices, Microbatches, PerDevice, Source, schedule_of
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.measured import is_layers_file, read_layers
from gpipe_bench.results.tables import lines_text
from gpipe_bench.schedules import check
from gpipe_bench.schedules.comparison import ActionTimes, Times, compared, from_own_durations, parting
from gpipe_bench.util.files import write_files

if TYPE_CHECKING:
    from gpipe_bench.bench.running.own_schedule import OwnRun, OwnSchedule

_HELP: Final = {
    "simulate": "Simulate one step of a schedule, beside arithmetic with the same durations and free transfers.",
    "emulate": "Let the engine run one step of a schedule on virtual devices, beside its simulation.",
    "run": "Run one step of a schedule on this machine, beside arithmetic with its own durations, or a simulation.",
}
_HEADER: Final = ("device", "kind", "microbatch", "partition", "predicted_start_ms", "predicted_end_ms", "start_ms",
                  "end_ms", "late_ms", "longer_ms")  # fmt: skip
_ARITHMETIC: Final = "by arithmetic, free transfers, and the median of each pass and partition"


def _setting(name: str, default: str | bool = True) -> Any:
    values = VALUES.get(name)
    text = SimulatedCell.model_fields[name].description
    return typer.Option(help=text, show_default=default, autocompletion=complete(values) if values else None)


def add_runs(app: typer.Typer) -> None:
    """Add the three commands."""
    for kind, text in _HELP.items():
        app.command(kind, help=text)(_command(kind))


def _command(kind: str) -> Callable[..., None]:
    def command(
        source: Source,
        *,
        devices: Devices = 4,
        microbatches: Microbatches = 8,
        per_device: PerDevice = 2,
        model: Annotated[str, _setting("model")] = "gpt2",
        model_args: Annotated[str, _setting("model_args")] = "",
        batch_size: Annotated[
            int | None,
            typer.Option(min=1, help="Samples per step.  [default: one per micro-batch, or those of measured layers]"),
        ] = None,
        balance: Annotated[
            str, typer.Option(help="Layers per partition, joined by '-'.  [default: even in time]")
        ] = "",
        checkpoint: Annotated[str, _setting("checkpoint")] = "never",
        profile: Annotated[str, _setting("profile", default="h100; run: none, no simulation")] = "",
        launch_us: Annotated[float | None, _setting("launch_us")] = None,
        tolerance: Annotated[
            float, typer.Option(min=0, max=1, help="Share of the step by which an action may be off its prediction.")
        ] = 0.02,
        out: Annotated[Path | None, stem("Path without suffix, for a table of all actions and a figure.")] = None,
    ) -> None:
        from gpipe_bench.bench.running.own_schedule import OwnSchedule

        if out is not None and Path(source).resolve() == _table(out).resolve():
            raise ConfigError([f"--out must not be the schedule's own file, got {out}; name another one"])
        schedule = check(schedule_of(source, devices, microbatches, per_device)).schedule
        m = schedule.microbatches
        hardware = profile or ("" if kind == "run" else "h100")
        sizes = read_balance(balance) if balance else ()
        size = batch_size or m * ((read_layers(model)[0].samples if is_layers_file(model) else None) or 1)
        own = OwnSchedule(schedule, model, model_args, size, checkpoint, hardware, launch_us, sizes)
        with progress(f"{kind}: {Path(source).name}"):
            run, predicted, words = _both(kind, own)
        rows = compared(own.actions, predicted, run.times)
        limit_ms = tolerance * run.length_ms
        _print(rows, run, words, limit_ms, "" if run.evidence == "measured" else use_words(None, launch_us))
        if out is not None:
            _write(out, rows, f"{model}: one step of {Path(source).name}", (run.evidence, words), limit_ms)
        if kind == "emulate":
            from gpipe_bench.emulator.library import leave

            leave(0)

    return command


def _both(kind: str, own: OwnSchedule) -> tuple[OwnRun, Times, str]:
    if kind == "emulate":
        from gpipe_bench.emulator.build import require_virtual_devices

        require_virtual_devices()
        run = own.emulated()
        return run, own.simulated().times, _simulated_on(own)
    predicted = own.simulated() if own.profile else None
    run = predicted if kind == "simulate" and predicted else own.measured()
    if kind == "simulate" or predicted is None:
        return run, from_own_durations(own.actions, run.times), _ARITHMETIC
    return run, predicted.times, _simulated_on(own)


def _simulated_on(own: OwnSchedule) -> str:
    return f"simulated on {own.profile}{use_words(None, own.launch_us)}"


def _print(rows: Sequence[ActionTimes], run: OwnRun, words: str, limit_ms: float, use: str) -> None:
    if not rows:
        raise ConfigError(["a step must have actions that take time, got none; use a larger model or batch"])
    expected = max(row.predicted[1] for row in rows)
    typer.echo(f"{run.evidence}{use}: {run.length_ms:.2f} ms; predicted {words}: {expected:.2f} ms")
    if run.bound_by_host:
        typer.echo(HOST_BOUND)
    for caveat in run.caveats:
        typer.echo(caveat)
    latest = max(rows, key=lambda row: row.late_ms)
    typer.echo(
        f"latest action: {latest.action} on device {latest.device}, {latest.late_ms:.2f} ms after its prediction"
    )
    first = parting(rows, limit_ms)
    if first is None:
        typer.echo(f"no action is more than {limit_ms:.2f} ms off its prediction")
        return
    typer.echo(
        f"the two part ways at {first.action} on device {first.device}: predicted {first.predicted[0]:.2f} to "
        f"{first.predicted[1]:.2f} ms, {run.evidence} {first.actual[0]:.2f} to {first.actual[1]:.2f} ms"
    )


def _table(out: Path) -> Path:
    return out.with_name(f"{out.name}.csv")


def _write(out: Path, rows: Sequence[ActionTimes], title: str, words: tuple[str, str], limit_ms: float) -> None:
    from gpipe_bench.figures.action_times import ActionFigure, action_figure
    from gpipe_bench.figures.style import drawing, save

    table = _table(out)
    lines = [
        [row.device, *row.action, *(f"{ms:.6f}" for ms in (*row.predicted, *row.actual, row.late_ms, row.longer_ms))]
        for row in rows
    ]
    write_files({table: lines_text([[*_HEADER], *lines])})
    evidence, predicted = words
    with drawing():
        paths = save(action_figure(ActionFigure(rows, parting(rows, limit_ms), title, predicted, evidence)), out)
    typer.echo(f"wrote {', '.join(map(str, [table, *paths]))}")
