"""The files of the repository, as the project's own tests read them."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every file that is, or is about to be, in version control; all but known outputs where git has none."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    else:
        hidden = {".venv", ".uv", ".git", ".snakemake", "results", "figures", "logs", "__pycache__"}
        named = ((path, path.relative_to(ROOT).parts) for path in ROOT.rglob("*"))
        paths = (path for path, parts in named if not hidden.intersection(part.split("-torch-")[0] for part in parts))
    return tuple(sorted(path for path in paths if path.is_file()))


def texts(*suffixes: str) -> list[tuple[str, str]]:
    """Name, relative to the root, and text of every file with one of the suffixes or names."""
    return [
        (str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for path in tracked_files()
        if path.suffix in suffixes or path.name in suffixes
    ]
