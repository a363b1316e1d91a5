"""The lines of a trace row by row: a first one about the whole, then one for each row (``machine/trace_file.py``)."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any, Final

from gpipe_bench.errors import TraceError

HEAD: Final = {"format": "gpipe_bench trace", "version": 1}
"""What the first line says of the format."""

_MORE: Final = frozenset({"rows", "step_ns", "memory", "latencies_ns"})


def read_lines(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """The first line of a trace, and the lines of its rows; a compressed file is known by its first bytes.

    Raises:
        TraceError: it cannot be read, is of another format, or was cut.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("utf-8-sig")
        head, *lines = map(json.loads, text.splitlines() or [""])
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise TraceError(
            f"a trace must be a file of JSON lines, got {error} in {path}; write it by simulate or emulate --trace"
        ) from error
    if not isinstance(head, dict) or {name: head[name] for name in head.keys() - _MORE} != HEAD:
        raise TraceError(f"a trace must begin with {json.dumps(HEAD)}, got {str(head)[:80]} in {path}; write it anew")
    if (told := head.get("rows", len(lines))) != len(lines):
        change = "write it anew, or leave out rows in the first line"
        raise TraceError(f"a trace must have the {told} rows of its first line, got {len(lines)} in {path}; {change}")
    return head, lines
