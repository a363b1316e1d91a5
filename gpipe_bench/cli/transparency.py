"""``transparency run``, ``all`` and ``collect``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.bench.spec.validation import validated
from gpipe_bench.bench.transparency.settings import TransparencyCell, TransparencySettings
from gpipe_bench.cli.options import Processes, complete, number, tell
from gpipe_bench.cli.progress import progress
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.arguments import nearest
from gpipe_bench.results.transparency_rows import arm_label
from gpipe_bench.util.files import check_writable, json_text, write_files

app = typer.Typer(
    help="Train on real images with and without the pipeline, and say what differs and why.", no_args_is_help=True
)

_DEFAULT = TransparencySettings()
Out = Annotated[Path, typer.Option(help="Table of rows; its companions go beside it.")]
Margin = Annotated[float, number("Accuracies that differ by less count as equivalent.", most=1.0)]
LossMargin = Annotated[float, number("Training losses that differ by less count as equivalent.", most=1e6)]
Set = Annotated[list[str] | None, typer.Option("--set", help="A setting, such as amoebanet.steps=20; may be repeated.")]


@app.command("run")
def run(
    workload: Annotated[
        str, typer.Argument(help="amoebanet or unet.", autocompletion=complete(lambda: ("amoebanet", "unet")))
    ],
    *,
    out: Annotated[Path, typer.Option(help="The raw result to write, a JSON file.")],
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of split, order, weights and noise.")] = 0,
    seeds: Annotated[int, typer.Option(min=0, max=1000, help="Train seeds 0, 1, ..., so many; 0: the one above.")] = 0,
    changes: Set = None,
    key: Annotated[str, typer.Option(help="Seeds that an interrupted call left are kept if theirs is the same.")] = "",
    processes: Processes = 1,
) -> None:
    """Train all arms of one model, seed by seed, side by side, and write the raw result."""
    from gpipe_bench.bench.storage.kept import KeptParts
    from gpipe_bench.bench.transparency.run import run_seeds

    _check_images()
    settings = _settings(changes)
    names = [name for name, value in settings if not isinstance(value, float)]
    if workload not in names:
        raise ConfigError([f"workload must be one of {', '.join(names)}, got {workload!r}; {nearest(workload, names)}"])
    cell = getattr(settings, workload).cells()[0]
    check_writable(out)
    kept = KeptParts.beside(out, key)
    numbers = range(seeds) if seeds else [seed]
    cells = [TransparencyCell.model_validate({**cell.model_dump(), "seed": number}) for number in numbers]
    if seed and seeds:
        tell(f"seed: {seed} is not used, since --seeds {seeds} trains 0 to {seeds - 1}")
    with progress(f"training {workload}") as task:
        raw = run_seeds(cells, kept, processes, lambda done: task.step(done, len(cells)))
    write_files({out: json_text(raw)})
    kept.remove()
    typer.echo(f"wrote {out}")


@app.command("all")
def everything(out: Out = Path("results/transparency.csv"), changes: Set = None, processes: Processes = 1) -> None:
    """Train all models and seeds, and write rows, steps, layers and verdicts; some minutes."""
    from gpipe_bench.bench.transparency.run import collect_transparency, run_transparency
    from gpipe_bench.bench.transparency.verdict import Margins

    _check_images()
    settings = _settings(changes)
    check_writable(out)
    paths = []
    cells = settings.cells()
    with progress("training") as task:
        for done, cell in enumerate(cells):
            task.step(done, len(cells), cell.id)
            paths.append(out.parent / "raw" / f"{cell.id}.json")
            write_files({paths[-1]: json_text(run_transparency(cell, processes))})
    _say(collect_transparency(paths, out, Margins(settings.margin, settings.loss_margin)))


@app.command("collect")
def collect(
    raw: Annotated[list[Path], typer.Argument(help="Raw results.")],
    out: Out,
    margin: Margin = _DEFAULT.margin,
    loss_margin: LossMargin = _DEFAULT.loss_margin,
) -> None:
    """Join raw results into tables, and print the verdicts."""
    from gpipe_bench.bench.transparency.run import collect_transparency
    from gpipe_bench.bench.transparency.verdict import Margins

    _say(collect_transparency(raw, out, Margins(margin, loss_margin)))


def _check_images() -> None:
    """Refuse to train without the package that has the images, before anything is written."""
    if find_spec("sklearn") is None:
        install = "pip install 'gpipe-bench[data]'"
        raise ConfigError([f"scikit-learn must be installed for its images, got no such package; {install}"])


def _settings(changes: list[str] | None) -> TransparencySettings:
    from gpipe_bench.util.yaml_text import read_yaml

    data: dict[str, dict[str, object]] = {}
    for change in changes or []:
        path, found, text = change.partition("=")
        section, dot, key = path.partition(".")
        if not (found and dot):
            raise ConfigError([f"--set must be like unet.steps=20, got {change!r}; write section.key=value"])
        try:
            data.setdefault(section, {})[key] = read_yaml(text)
        except ValueError as error:
            rule = f"--set {path} must have a value, got an error in it: {error}"
            raise ConfigError([f"{rule}; write it like unet.steps=20"]) from error
    return validated(TransparencySettings, data, lambda path: f"--set {'.'.join(path)}")


def _say(found: list[dict[str, object]]) -> None:
    for v in found:
        setting = arm_label(str(v["arm"]), str(v["checkpoint"]), v["deferred_batch_norm"])
        interval = "" if v["low"] is None else f" [{v['low']:.3g}, {v['high']:.3g}]"
        head = f"{v['model']} {v['precision']} {v['normalisation']} {setting}"
        typer.echo(f"{head}: {v['quantity']} {v['estimate']:.3g}{interval} n={v['n']}: {v['verdict']}")
