"""A session on one GPU, with its progress on stderr and its table on stdout."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import NamedTuple

from gpipe_bench.bench.evaluation.summary import print_summary
from gpipe_bench.bench.experiments.config import SuiteConfig, load_config
from gpipe_bench.bench.experiments.session import TINY, Session, SessionPlan, check_unused, session_runs
from gpipe_bench.bench.peers.settings import SHORT
from gpipe_bench.bench.spec.machine import DEVICES, Machine, find_machine
from gpipe_bench.cli.progress import progress
from gpipe_bench.errors import ConfigError
from gpipe_bench.files import check_writable
from gpipe_bench.models.arguments import nearest


class GpuOptions(NamedTuple):
    """What the command was given; see its help."""

    out: Path
    budget_s: float
    profile_s: float
    device: str
    tiny: bool
    tests: Path | None
    bundle: bool
    config: tuple[Path, ...]


def run_session(options: GpuOptions) -> int:
    """Run a session; returns the exit status.

    Raises:
        ConfigError, DeviceCountError, OutputError: bad options; nothing was written.
    """
    plan = _plan(options)
    check_unused(plan.out)
    check_writable(plan.out / "ablation.csv")
    steps = count(1)
    with progress("measuring") as task:

        def report(line: str) -> None:
            task.line(line, err=True)
            task.step(next(steps), len(plan.runs) + 3)

        session = Session(plan, report)
        try:
            tested, _, _ = session.test(), session.profile(), session.race()
            session.measure()
        finally:
            rows = session.write()
    if options.bundle:
        session.bundle()
    files = [path for path in sorted(plan.out.rglob("*.*")) if path.is_file() and path.parent.parent.name != "raw"]
    print_summary(rows, files)
    return 1 if tested.startswith(("failed", "stopped")) or not any(row.status == "ok" for row in rows) else 0


def _plan(options: GpuOptions) -> SessionPlan:
    if options.device not in DEVICES:
        hint = nearest(options.device, DEVICES)
        raise ConfigError([f"--device must be one of {', '.join(DEVICES)}, got {options.device!r}; {hint}"])
    find_machine(options.device)
    config = load_config(options.config) if options.config else SuiteConfig()
    workload = config.ablation.cuda if options.device == "cuda" else config.ablation.cpu
    runs = session_runs(TINY if options.tiny else workload, Machine(options.device, 1))
    race = ("--quick", "--set", 'contenders=["engine-scheduled","torchgpipe"]') if options.tiny else SHORT.changes()
    return SessionPlan(options.out, runs, options.device, options.budget_s, options.profile_s, options.tests, race)
