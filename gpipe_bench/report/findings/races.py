"""Findings of the race of peers: host time of tiny layers, throughput of networks, each over its baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from gpipe_bench.figures.text import TIMES, significant
from gpipe_bench.peer_rows import TINY, PeerRow
from gpipe_bench.report.findings.finding import Finding, plural

__all__ = ["race_findings"]


def race_findings(rows: Sequence[PeerRow], section: str) -> Iterator[Finding]:
    """A finding per machine: the contenders of each workload, best first."""
    good = [row for row in rows if row.status == "ok" and row.ratio is not None and row.contender != row.baseline]
    columns = ["evidence", "device", "profile", "workload", "baseline", "contender", "ratio"]
    table = pd.DataFrame([{name: getattr(row, name) for name in columns} for row in good], columns=columns)
    for (evidence, device, profile), members in table.groupby(["evidence", "device", "profile"], sort=False):
        sentences = [
            _sentence(str(workload), str(baseline), ratios)
            for (workload, baseline), ratios in members.groupby(["workload", "baseline"], sort=False)
        ]
        where = f"{device} ({profile})" if profile else str(device)
        yield Finding("Peers", (str(evidence),), where, tuple(sentences), section)


def _sentence(workload: str, baseline: str, members: pd.DataFrame) -> str:
    tiny = workload in TINY
    what = "host time per cell" if tiny else "throughput"
    better = "less" if tiny else "more"
    found = members.groupby("contender", sort=False)["ratio"].agg(["median", "count"])
    ranked = found.sort_values("median", ascending=tiny, kind="stable")
    parts = [f"{name} {significant(ratio['median'], 2)}{TIMES}" for name, ratio in ranked.iterrows()]
    layers = " (tiny layers)" if tiny else ""
    settings = plural(int(ranked["count"].max()), "setting")
    return (
        f"{workload}{layers}: {what} over that of {baseline}, {better} is better, median of up to {settings}: "
        f"{', '.join(parts)}."
    )
