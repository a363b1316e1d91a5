"""A recorded run as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gpipe_bench.results.rows import Row
from gpipe_bench.results.timeline import TimelineEvent, chrome_trace
from gpipe_bench.util.files import json_text, write_files


def write_trace(out: Path, variant: str, row: Row, events: Iterable[TimelineEvent], remark: str = "") -> None:
    """Write one step of one run.

    Args:
        out: the JSON file.
        variant: label of the components.
        row: the run that is shown.
        events: its events; none when nothing was recorded.
        remark: why nothing was recorded.

    Raises:
        OutputError: the file cannot be written.
    """
    title = f"{row.model} {variant} ({row.evidence})"
    facts = {
        "evidence": row.evidence,
        "variant": row.variant,
        "model": f"{row.model} {row.model_args}",
        "device": row.device,
        "repeat": str(row.repeat),
        "processes": f"{row.processes} on {row.hosts} hosts" if row.processes != 1 else "",
        "clock_error_us": "" if row.clock_error_us is None else f"{row.clock_error_us:.1f}",
        "remark": remark,
    }
    metadata = {name: text for name, text in facts.items() if text}
    trace = chrome_trace(events, title=f"{title}: {remark}" if remark else title, metadata=metadata)
    write_files({out: json_text(trace)})
