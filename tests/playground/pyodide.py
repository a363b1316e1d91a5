"""Where npm's package ``pyodide`` is, if it is here."""

from __future__ import annotations

import os
from pathlib import Path

from gpipe_bench.playground.page import PYODIDE_FILES

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpipe_bench/npm/node_modules/pyodide"
NO_PYODIDE = (
    f"needs npm's package pyodide in {CACHE}, where scripts/install_pyodide.sh puts it, or in GPIPE_BENCH_PYODIDE"
)


def pyodide_folder() -> Path | None:
    folder = Path(os.environ.get("GPIPE_BENCH_PYODIDE") or CACHE)
    return folder if all((folder / name).is_file() for name in PYODIDE_FILES) else None
