"""What the default configuration asks for, as lines of text: a golden list of every cell and job of every machine.

``python -m tests.suite.default_plan`` writes it anew, as digests; with a folder it writes the lines themselves there,
to compare two of them by ``diff``.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gpipe_bench.suite.experiments.plan import SuitePlan, advice_settings, make_plan

GOLDEN = Path(__file__).with_name("data") / "default_plan.csv"
MACHINES = ("cpu", "1 GPU", "4 GPUs", "8 GPUs")


def plan_of(machine: str) -> SuitePlan:
    """The default plan of a machine."""
    settings = {"device": "cpu"} if machine == "cpu" else {"device": "cuda", "device_count": int(machine[0])}
    return make_plan(settings, [])


def lists_of(plan: SuitePlan) -> Iterator[tuple[str, list[str]]]:
    """Each list of a plan by its name, in the order of the plan."""
    for name, table in plan.tables.items():
        yield f"{name} measured", [f"{run.job} {run.cell.id} {run.repeat}" for run in table.runs]
        yield f"{name} simulated", [cell.id for cell in table.simulated]
        yield f"{name} emulated", [cell.id for cell in table.emulated]
        yield f"{name} tables", [*table.published]
        yield f"{name} raw", table.raw
    virtual, measured = plan.named("simulated", "emulated").items(), plan.named("measured").items()
    yield "jobs", [f"{name} {job.only} {job.kept} {Path(job.profile).name}" for name, job in virtual]
    yield "timed", [f"{name} {job.only} {job.repeats} {job.accelerators}" for name, job in measured]
    yield "figures", [f"{name} {figure.kind} {figure.table} {figure.evidence}" for name, figure in plan.figures.items()]
    yield "verified", [*plan.verified, *plan.allowed_parts]
    yield "advice", [f"{name} {request}" for name, request in advice_settings(plan).items()]


def golden_lines() -> list[str]:
    """The lines of the golden list: machine, list, number of its lines, digest of them."""
    lines = ["machine,list,lines,sha256"]
    for machine in MACHINES:
        for name, found in lists_of(plan_of(machine)):
            digest = hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]
            lines.append(f"{machine},{name},{len(found)},{digest}")
    return lines


def main(arguments: list[str]) -> None:
    """Write the golden list, or the lines behind it into a folder."""
    os.sched_getaffinity = lambda _: {0, 1}
    if not arguments:
        GOLDEN.write_text("\n".join([*golden_lines(), ""]))
        return
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for machine in MACHINES:
        for name, found in lists_of(plan_of(machine)):
            (folder / f"{machine} {name}.txt").write_text("\n".join([*found, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
