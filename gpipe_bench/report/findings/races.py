"""Findings of the race of peers: host time of tiny layers, throughput of networks, each over its baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pandas as pd

from gpipe_bench.figures.text import TIMES, significant
from gpipe_bench.report.findings.finding import NBSP, Finding, plural
from gpipe_bench.results.peer_rows import TINY, PeerRow

_OWN: Final = "gpipe_bench"
"""The package of the engine's contenders."""


def race_findings(rows: Sequence[PeerRow], section: str) -> Iterator[Finding]:
    """A finding per machine: the engine beside the baseline of each workload; then all contenders, best first."""
    good = [row for row in rows if row.status == "ok" and row.ratio is not None and row.contender != row.baseline]
    columns = ["evidence", "device", "profile", "workload", "baseline", "contender", "package", "ratio"]
    table = pd.DataFrame([{name: getattr(row, name) for name in columns} for row in good], columns=columns)
    for (evidence, device, profile), members in table.groupby(["evidence", "device", "profile"], sort=False):
        workloads = [
            (str(workload), str(baseline), ratios)
            for (workload, baseline), ratios in members.groupby(["workload", "baseline"], sort=False)
        ]
        own = [(workload, baseline, ratios[ratios["package"] == _OWN]) for workload, baseline, ratios in workloads]
        leads = [_sentence(workload, baseline, ratios) for workload, baseline, ratios in own if not ratios.empty]
        more = [_sentence(*workload) for workload in workloads]
        where = f"{device} ({profile})" if str(profile) else str(device)
        yield Finding("Peers", (str(evidence),), where, (*leads, *more), section, shown=len(leads))


def _sentence(workload: str, baseline: str, members: pd.DataFrame) -> str:
    tiny = workload in TINY
    found = members.groupby("contender", sort=False)["ratio"].agg(["median", "count"])
    ranked = found.sort_values("median", ascending=tiny, kind="stable")
    parts = [f"{name} {significant(ratio['median'], 2)}{NBSP}{TIMES}" for name, ratio in ranked.iterrows()]
    settings = plural(int(ranked["count"].max()), "setting")
    what, better = ("Host time per cell", "less") if tiny else ("Throughput", "more")
    layers = f"{workload} (tiny layers)" if tiny else workload
    return (
        f"{what} over that of {baseline} on {layers}, {better} is better, median of up to {settings}: "
        f"{', '.join(parts)}."
    )
