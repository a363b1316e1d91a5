"""Everything that one GPU is worth measuring for, inside a fixed time: a profile of the device, a race, the ablation.

Made for a machine that one has for minutes, with neither a network nor Snakemake. Each run is a fresh process. What
the time did not suffice for is a row with status ``skipped``: nothing is shortened without saying so.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import Any, Final

from gpipe_bench.bench.evaluation.collect import write_tables
from gpipe_bench.bench.experiments.grid import Experiment, read_experiment
from gpipe_bench.bench.running.run import failed_result
from gpipe_bench.bench.spec.cell_files import cells_text
from gpipe_bench.bench.spec.cells import CellRun
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.bench.storage.raw import RawResult
from gpipe_bench.components import PUBLISHED
from gpipe_bench.data import checkout_folder
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.outcomes import typical
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import companion_path
from gpipe_bench.results.timeline import TimelineEvent, write_trace
from gpipe_bench.util.files import DRAFT_PREFIX, json_text, staging, write_files

TINY: Final = read_experiment(
    {
        "tiny": {
            "run": "measured",
            "model_args": "depth=2;B=1;C=4;size=16",
            "batch_size": 4,
            "chunks": 2,
            "balance": "14-15",
            "variant": "published",
            "transfer": "host",
            "share_devices": True,
            "steps": 2,
        }
    },
    ".".join,
)
"""A workload of seconds, to rehearse a session with."""

_MARGIN: Final = 1.15
_PROFILE_S: Final = 180.0
_RACE_S: Final = 120.0
_NOT_ASKED: Final = "not run: not asked for"
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What a session does.

    Attributes:
        out: folder of the results.
        runs: the runs of the ablation, most important first.
        device: device of the profile, such as ``cuda``.
        budget_s: seconds for everything.
        race: options of the race of peers; None for no race.
        bundle: whether to pack the folder at the end.
    """

    out: Path
    runs: Sequence[CellRun]
    device: str
    budget_s: float = 570.0
    race: Sequence[str] | None = None
    bundle: bool = False


def session_runs(experiment: Experiment, machine: Machine) -> list[CellRun]:
    """The runs of an experiment, round by round: those of the published variants, then those of the others."""
    return sorted(experiment.runs(machine), key=lambda run: (run.cell.variant not in PUBLISHED, run.repeat))


@dataclass(slots=True)
class Session:
    """One session under way.

    Attributes:
        plan: what to do.
        report: takes a line about each step that ended.
    """

    plan: SessionPlan
    report: Report
    results: list[RawResult] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    _start: float = field(default_factory=monotonic)
    _longest_s: float = 0.0

    @property
    def tables(self) -> Path:
        """The table of rows; companions lie beside it."""
        return self.plan.out / "ablation.csv"

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.plan.budget_s - (monotonic() - self._start)

    def profile(self) -> str:
        """Profile the device into ``profile.yaml``; returns ``done``, or what else."""
        out = self.plan.out / "profile.yaml"
        outcome = self._run([*_PACKAGE, "profile", "--device", self.plan.device, "--out", str(out)], _PROFILE_S)
        return self._note("profile", "device profile", outcome)

    def race(self) -> str:
        """Race the engine beside its peers, into ``race/``; returns ``done``, or what else.

        Peers that are not installed are rows with status ``skipped``.
        """
        out, options = self.plan.out / "race" / "peers.csv", self.plan.race
        if options is None:
            return self._note("race", "race of peers", _NOT_ASKED)
        root = checkout_folder()
        if root is None:
            return self._note("race", "race of peers", "not run: an installed package has no studies")
        command = [*_RACE, "run", "--device", self.plan.device, *options, "--out", str(out.resolve())]
        return self._note("race", "race of peers", self._run(command, _RACE_S, root))

    def _run(self, command: Sequence[str], limit_s: float, folder: Path | None = None) -> str:
        """Run a command, in a folder: ``done``, or what else."""
        limit = max(min(self.left_s, limit_s), 0.0)
        status = run_child(command, self._log, limit, folder)
        known = {None: f"stopped after {limit:.0f} s", 0: "done"}
        return known.get(status, f"failed with exit status {status}, see {self._log.name}")

    def _note(self, name: str, what: str, outcome: str) -> str:
        self.facts[name] = outcome
        self.report(f"{what}: {outcome}")
        return outcome

    def measure(self) -> None:
        """Make every run that the budget allows; the others become rows that say so."""
        for number, run in enumerate(self.plan.runs, start=1):
            before = self.left_s
            result = self._measure(run)
            self.results.append(result)
            spent = before - self.left_s
            if result.row.status == "ok":
                self._longest_s = max(self._longest_s, spent)
            what = f"{run.cell.variant} repeat {run.repeat}: {_words(result.row)}"
            self.report(f"run {number} of {len(self.plan.runs)}, {spent:.0f} s: {what}")

    def _measure(self, run: CellRun) -> RawResult:
        unsupported = run.cell.unsupported()
        if unsupported:
            return failed_result(run.cell, run.repeat, "unsupported", unsupported)
        limit = self.left_s
        if limit <= self._longest_s * _MARGIN:
            reason = f"the budget of {self.plan.budget_s:g} s did not suffice for this run"
            return failed_result(run.cell, run.repeat, "skipped", reason)
        out = self.plan.out / "raw" / run.cell.id / f"{run.repeat}.json"
        cells = self.plan.out / "raw" / run.cell.id / "cells.json"
        write_files({cells: cells_text([run.cell])})
        command = [*_PACKAGE, "run", "--cells", str(cells), "--repeat", str(run.repeat), "--out", str(out)]
        status = run_child(command, self._log, limit)
        if status is None:
            reason = f"stopped after {limit:.0f} s: the budget of {self.plan.budget_s:g} s is spent"
            return failed_result(run.cell, run.repeat, "skipped", reason)
        if status != 0:
            reason = f"the process ended with status {status} and without a result; see {self._log.name}"
            return failed_result(run.cell, run.repeat, "error", reason)
        return RawResult.read(out)

    def write(self) -> list[Row]:
        """Write the tables, the traces of the published variants and ``environment.json``; returns the rows."""
        rows = write_tables(self.results, "ablation", self.tables)
        for variant in PUBLISHED:
            good = {r.row: r for r in self.results if r.row.variant == variant and r.row.status == "ok"}
            if good:
                result = good[typical([*good])]
                events = [TimelineEvent(**event) for event in result.events]
                write_trace(self.plan.out / "traces" / f"{variant}.json", variant, result.row, events)
        self.facts |= {"budget_s": self.plan.budget_s, "spent_s": round(self.plan.budget_s - self.left_s, 1)}
        self.facts["packages"] = dict(sorted((d.name, d.version) for d in metadata.distributions()))
        write_files({self.plan.out / "environment.json": json_text(self.facts)})
        return rows

    def bundle(self) -> Path:
        """Pack the folder into ``bundle.tar.gz`` in it, and keep raw results, timelines and race only there."""
        out = self.plan.out
        with staging(out) as folder:
            with tarfile.open(folder / "bundle.tar.gz", "w:gz") as archive:
                for path in sorted(out.iterdir()):
                    if not path.name.startswith(DRAFT_PREFIX):
                        archive.add(path, arcname=f"{out.resolve().name}/{path.name}")
            (folder / "bundle.tar.gz").replace(out / "bundle.tar.gz")
        for name in ("raw", "traces", "race"):
            shutil.rmtree(out / name, ignore_errors=True)
        companion_path(self.tables, "events").unlink(missing_ok=True)
        return out / "bundle.tar.gz"

    @property
    def _log(self) -> Path:
        return self.plan.out / "log.txt"


_PACKAGE: Final = (sys.executable, "-m", "gpipe_bench")
_RACE: Final = (sys.executable, "-m", "studies.peers")
"""A study, which only a checkout has."""


def check_unused(out: Path) -> None:
    """Refuse a folder with results of another session.

    Raises:
        ConfigError: it holds some.
    """
    if any((out / name).exists() for name in ("ablation.csv", "raw", "log.txt", "bundle.tar.gz")):
        raise ConfigError([f"--out must be a folder without an earlier session, got {out}; name another or remove it"])


def run_child(command: Sequence[str], log: Path, timeout_s: float, cwd: Path | None = None) -> int | None:
    """Run ``command``, append what it prints to ``log``, and end all that it has started.

    Args:
        command: program and arguments.
        log: file for its output.
        timeout_s: after this long it is killed.
        cwd: where to run it.

    Returns:
        Its exit status, negative for a signal; None when it was killed for its time.
    """
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        # A session of its own makes one group of the child and its children, which can be killed as one.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, start_new_session=True
        )
        try:
            return child.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # the usual case: the whole group has ended by itself
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _words(row: Row) -> str:
    if row.status == "ok" and row.throughput_samples_per_s is not None:
        return f"{row.throughput_samples_per_s:.1f} samples/s"
    return f"{row.status}: {row.reason}"
