"""What Snakemake says of its jobs, a line each: ``[12/29] measuring 1f1b, 3 repeats … about 2 min left``.

Snakemake's own lines for a job name its number and all of its files. They stay in dry runs.
A job that fails shows the end of its log, and what to do. After an interrupt one line says how to go on: jobs that
were cut off have not failed, and nothing needs a change.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TextIO

_SHOWN: Final = 20
"""Lines of the log of a job that failed."""
_GO_ON: Final = "Finished jobs keep their results: the same command goes on from here."
_INTERRUPTS: Final = ("Terminating processes on user request", "Will exit after finishing currently running jobs")
"""How Snakemake's texts begin after SIGINT, and after SIGTERM."""
# Events of Snakemake's logger that say where a run is, and texts without an event that say how it was started.
_PLACES: Final = frozenset({"run_info", "workflow_started", "resources_info", "shellcmd", "job_started"})
_STARTED: Final = (
    *("Assuming unrestricted", "Building DAG", "Using shell", "Provided ", "Rules claiming", "Conda environments"),
    *("Select jobs", "Execute ", "host:"),
)


_SAID: Final = {
    "figure": "drawing {}",
    "redraw": "drawing the figures of the reference results",
    "collect": "collecting the rows of {}",
    "trace": "writing a trace: {}",
    "trace_virtual": "writing a trace: {}",
    "advise": "searching the best schedule: {}",
    "simulate_published": "simulating the published table {}",
    "predictions": "simulating every published cell",
    "judge_engines": "judging every engine",
    "report": "writing the report",
    "check_results": "checking results against the reference",
    "run_transparency": "training with and without a pipeline: {}",
    "collect_transparency": "collecting the rows of transparency",
    "figure_transparency": "drawing transparency",
    "redraw_transparency": "drawing transparency of the reference results",
    "race_peers": "racing other pipelines",
    "figure_peers": "drawing the race",
    "redraw_peers": "drawing the race of the reference results",
}
"""What a job of a rule does; its wildcards in the braces."""
_USUAL_S: Final = {
    "simulate": 15.0,
    "emulate": 40.0,
    "run_cell": 15.0,
    "advise": 60.0,
    "predictions": 20.0,
    "judge_engines": 600.0,
    "race_peers": 300.0,
    "run_transparency": 60.0,
}
"""About how long a job of a rule takes on two cores, until one has ended here."""
_SHORT_S: Final = 3.0


class Steps(logging.Filter):
    """A filter of Snakemake's logger that writes a line per job, and passes on what is no news of a job.

    Args:
        words: what a job does, by the value of the wildcard that names it.
        idle: whether the run is a dry one, which is known when Snakemake begins; all records are passed on then.
        out: where the lines go; by default stderr. On a terminal there is one line, which changes.
    """

    def __init__(
        self, words: Mapping[str, str], idle: Callable[[], bool] = lambda: False, out: TextIO | None = None
    ) -> None:
        super().__init__()
        self._words, self._idle, self._out = words, idle, out or sys.stderr
        self._begin, self._begun, self._done, self._total = time.monotonic(), 0, 0, 0
        self._waiting: Counter[str] = Counter()
        self._running: dict[Any, tuple[str, float]] = {}
        self._took: dict[str, list[float]] = {}
        self._live, self._interrupted = self._out.isatty(), False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether Snakemake is to print the record."""
        if self._idle():
            return True
        if self._interrupted:
            return False
        event = str(getattr(getattr(record, "event", None), "value", ""))
        if event == "run_info":
            stats = dict(getattr(record, "stats", {}))
            self._total = int(stats.pop("total", 0))
            self._waiting = Counter(stats)
        elif event == "progress":
            self._done, self._total = record.__dict__["done"], record.__dict__["total"]
            if self._live and self._done == self._total:
                self._write("")
        elif event == "job_info":
            self._begin_job(record.__dict__)
            self._write(self._line(record.__dict__))
        elif event == "job_finished":
            self._end_job(record.__dict__.get("job_id"))
        elif event == "job_error":
            self._write(self._failed(record.__dict__), stays=True)
        elif event in _PLACES or str(record.msg).startswith(_STARTED):
            pass
        elif str(record.msg).startswith(_INTERRUPTS):
            self._interrupted = True
            self._write(f"Interrupted. {_GO_ON}", stays=True)
        else:
            if self._live:
                self._write("")
            return True
        return False

    def _begin_job(self, job: Mapping[str, Any]) -> None:
        self._begun += 1
        self._waiting[job["rule_name"]] -= 1
        self._running[job.get("jobid")] = job["rule_name"], time.monotonic()

    def _end_job(self, number: Any) -> None:
        if number in self._running:
            rule, begin = self._running.pop(number)
            self._took.setdefault(rule, []).append(time.monotonic() - begin)

    def _line(self, job: Mapping[str, Any]) -> str:
        text = f"[{self._begun}/{max(self._total, self._begun)}] {self._what(job)}"
        left = self._left_s()
        return f"{text} … about {f'{left:.0f} s' if left < 100 else f'{left / 60:.0f} min'} left"

    def _left_s(self) -> float:
        """Seconds that all jobs take that are not done, each as long as others of its rule, and as many at once."""
        now, done = time.monotonic(), [time_s for times in self._took.values() for time_s in times]
        left = sum(number * self._usual_s(rule) for rule, number in self._waiting.items() if number > 0)
        left += sum(max(0.0, self._usual_s(rule) - (now - begin)) for rule, begin in self._running.values())
        spent = sum(done) + sum(now - begin for _, begin in self._running.values())
        return left / max(1.0, spent / max(now - self._begin, 1.0))

    def _usual_s(self, rule: str) -> float:
        times = self._took.get(rule)
        return fmean(times) if times else _USUAL_S.get(rule, _SHORT_S)

    def _what(self, job: Mapping[str, Any]) -> str:
        names = [str(value) for value in dict(job["wildcards"]).values()]
        known = [self._words[name] for name in names if name in self._words]
        said = _SAID.get(str(job["rule_name"]), str(job["rule_name"]).replace("_", " "))
        return known[0] if known else said.format(" ".join(names).replace("_", " ")).strip(": ")

    def _failed(self, job: Mapping[str, Any]) -> str:
        lines = [f"failed: {self._what({'wildcards': {}, **job})}"]
        for name in job["log"]:
            path = Path(str(name))
            said = path.read_text(errors="replace").splitlines() if path.is_file() else []
            lines += [f"the end of {name}:", *(f"  {line}" for line in said[-_SHOWN:])]
        return "\n".join([*lines, f"Change what the last line names. {_GO_ON}"])

    def _write(self, text: str, *, stays: bool = False) -> None:
        start, end = ("\r\033[2K", "\n" if stays else "") if self._live else ("", "\n")
        if text or self._live:
            self._out.write(f"{start}{text}{end}")
            self._out.flush()
