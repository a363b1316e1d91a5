"""What Snakemake says of its jobs, a line each: ``[12/29] measuring 1f1b, 3 repeats … about 2 min left``.

Snakemake's own lines for a job name its number and all of its files. They stay in dry runs.
A job that fails shows the end of its log, and what to do. After an interrupt one line says how to go on: jobs that
were cut off have not failed, and nothing needs a change.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TextIO

_SHOWN: Final = 20
"""Lines of the log of a job that failed."""
_GO_ON: Final = "Finished jobs keep their results: the same command goes on from here."
_INTERRUPTS: Final = ("Terminating processes on user request", "Will exit after finishing currently running jobs")
"""How Snakemake's texts begin after SIGINT, and after SIGTERM."""
# Events of Snakemake's logger that say where a run is, and texts without an event that say how it was started.
_PLACES: Final = frozenset(
    {"run_info", "workflow_started", "resources_info", "job_finished", "shellcmd", "job_started"}
)
_STARTED: Final = (
    *("Assuming unrestricted", "Building DAG", "Using shell", "Provided ", "Rules claiming", "Conda environments"),
    *("Select jobs", "Execute ", "host:"),
)


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
        self._live, self._interrupted = self._out.isatty(), False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether Snakemake is to print the record."""
        if self._idle():
            return True
        if self._interrupted:
            return False
        event = str(getattr(getattr(record, "event", None), "value", ""))
        if event == "run_info":
            self._total = int(getattr(record, "stats", {}).get("total", 0))
        elif event == "progress":
            self._done, self._total = record.__dict__["done"], record.__dict__["total"]
            if self._live and self._done == self._total:
                self._write("")
        elif event == "job_info":
            self._begun += 1
            self._write(self._line(record.__dict__))
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

    def _line(self, job: Mapping[str, Any]) -> str:
        text = f"[{self._begun}/{max(self._total, self._begun)}] {self._what(job)}"
        if self._done:
            left = (time.monotonic() - self._begin) / self._done * (self._total - self._done)
            text += f" … about {f'{left:.0f} s' if left < 100 else f'{left / 60:.0f} min'} left"
        return text

    def _what(self, job: Mapping[str, Any]) -> str:
        names = [str(value) for value in dict(job["wildcards"]).values()]
        known = [self._words[name] for name in names if name in self._words]
        return known[0] if known else " ".join([str(job["rule_name"]).replace("_", " "), *names])

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
