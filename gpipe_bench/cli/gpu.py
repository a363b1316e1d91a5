"""``gpu``: a session on one GPU, with its progress on stderr and its table on stdout."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.bench.evaluation.summary import print_summary
from gpipe_bench.bench.experiments.config import load_config
from gpipe_bench.bench.experiments.session import TINY, Session, SessionPlan, check_unused, session_runs
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.cli.options import check_device, named, number, tell
from gpipe_bench.cli.progress import progress
from gpipe_bench.util.files import check_writable


def gpu(
    *,
    out: Annotated[Path, typer.Option(help="Folder for rows, traces, profile and environment.")],
    budget_s: Annotated[float, number("Seconds for everything; what does not fit is skipped.", least=1)] = 570,
    device: Annotated[str, named("device", "cuda, or cpu to rehearse the session.")] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="A workload of seconds instead of the published one.")] = False,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="Pack all into bundle.tar.gz, and raw results and timelines only there.")
    ] = False,
    config: Annotated[list[Path] | None, typer.Option(help="Configuration, whose ablation is measured.")] = None,
) -> None:
    """Measure what one GPU is worth in ten minutes: device profile, race of peers, ablation as published.

    Needs no network and no Snakemake. Every run is a fresh process; the published variants come first, then the other
    combinations as far as the time goes, and the rest are rows with status skipped. All partitions share the one GPU
    and exchange tensors through host memory. With --bundle the folder has at most 8 files. Exit status 1 when
    nothing could be measured.
    """
    if tiny and config:
        tell("config: not used, since --tiny has a workload of its own")
    check_device(device)
    few = "{contenders: [engine-scheduled, torchgpipe]}"
    race = ("--preset", "quick", "--settings", few) if tiny else ("--preset", "short")
    runs = session_runs(TINY if tiny else load_config(config or []).experiment("ablation"), Machine(device, 1))
    raise typer.Exit(run_session(SessionPlan(out, runs, device, budget_s, race, bundle)))


def run_session(plan: SessionPlan) -> int:
    """Run a session; returns the exit status.

    Raises:
        ConfigError, OutputError: the folder cannot be used; nothing was written.
    """
    check_unused(plan.out)
    check_writable(plan.out / "ablation.csv")
    steps = count(1)
    with progress("measuring") as task:

        def report(line: str) -> None:
            task.line(line, err=True)
            task.step(next(steps), len(plan.runs) + 2)

        session = Session(plan, report)
        try:
            session.profile()
            session.race()
            session.measure()
        finally:
            rows = session.write()
    if plan.bundle:
        session.bundle()
    files = [path for path in sorted(plan.out.rglob("*.*")) if path.is_file() and path.parent.parent.name != "raw"]
    print_summary(rows, files)
    return 0 if any(row.status == "ok" for row in rows) else 1
