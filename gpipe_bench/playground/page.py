"""The files of the page: as a local server sends them, or as a folder that any web server can send."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import gpipe_bench
from gpipe_bench.drawing.colours import ACTION_COLOURS, ACTION_WORDS, LATER_PARTITION, TIMELINE_JS
from gpipe_bench.errors import ConfigError
from gpipe_bench.playground.questions import ask
from gpipe_bench.util.files import write_files
from gpipe_bench.util.imports import import_closure

QUESTIONS: Final = "gpipe_bench.playground.questions"
PYODIDE_FILES: Final = (
    *("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json"),
)
"""The files of npm's package ``pyodide`` that a page needs."""

_PARTS: Final = Path(__file__).with_name("parts")
_PACKAGE: Final = Path(gpipe_bench.__file__).parent
_SCRIPTS: Final = ("page.css", "page.js", "drawing.js", "engine.js", "settings.js")


def page_files() -> dict[str, bytes]:
    """The files of the page that asks a local server, by their names."""
    colours = {"actions": ACTION_COLOURS, "words": ACTION_WORDS, "over": LATER_PARTITION}
    page = _with_data((_PARTS / "page.html").read_text(encoding="utf-8"), "colours", colours)
    files = {name: (_PARTS / name).read_bytes() for name in _SCRIPTS}
    return {"index.html": page.encode(), "timeline.js": TIMELINE_JS.read_bytes(), **files}


def static_files() -> dict[str, bytes]:
    """The files of the page that runs Python itself, without those of Pyodide.

    The page brings the answers for its first settings along, so that it is drawn before Python has started.
    """
    files = page_files()
    page = files["index.html"].decode().replace('data-engine="server"', 'data-engine="pyodide"')
    files["index.html"] = _with_data(page, "first", _first_answers()).encode()
    return {**files, "worker.mjs": (_PARTS / "worker.mjs").read_bytes(), "gpipe_bench.zip": _modules()}


def export(folder: Path, pyodide: Path | None) -> list[Path]:
    """Write the page as static files. Nothing is downloaded, neither now nor by the page.

    Args:
        folder: where to write; other files in it stay.
        pyodide: the folder of npm's package ``pyodide``; None: whoever publishes the page adds it as ``pyodide``.

    Raises:
        ConfigError: that folder lacks a file.
        OutputError: a file cannot be written.
    """
    if pyodide is not None and (missing := [name for name in PYODIDE_FILES if not (pyodide / name).is_file()]):
        rule = "--pyodide must be the folder of npm's package pyodide"
        remedy = "npm install pyodide makes node_modules/pyodide"
        raise ConfigError([f"{rule}, got {pyodide} without {missing[0]}; {remedy}"])
    files: dict[Path, bytes] = {folder / name: content for name, content in static_files().items()}
    if pyodide is not None:
        files |= {folder / "pyodide" / name: (pyodide / name).read_bytes() for name in PYODIDE_FILES}
    write_files(files)
    return list(files)


def _first_answers() -> dict[str, object]:
    names = json.loads(ask('{"ask":"names"}'))
    steps = {f"step {name}": json.loads(ask(json.dumps({"ask": "step", "source": name}))) for name in names["names"]}
    summary = json.loads(ask(json.dumps({"ask": "summary", "sources": names["names"]})))
    return {"names ": names, "summary ": summary, **steps}


def _with_data(page: str, name: str, data: Mapping[str, object]) -> str:
    """The page with data before its first script."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace("<script", f'<script type="application/json" id="{name}">{text}</script>\n<script', 1)


def _modules() -> bytes:
    """The modules that answer questions, and all that they import of this package, as a zip file."""

    def find(name: str) -> Path | None:
        top, _, below = name.partition(".")
        path = _PACKAGE.joinpath(*below.split(".")) if below else _PACKAGE
        own = (path.with_suffix(".py"), path / "__init__.py") if top == "gpipe_bench" else ()
        return next((one for one in own if one.is_file()), None)

    first = find(QUESTIONS)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted(import_closure({QUESTIONS: first} if first else {}, find).values()):
            # Without a date: the same modules give the same bytes.
            info = zipfile.ZipInfo(f"gpipe_bench/{path.relative_to(_PACKAGE).as_posix()}")
            archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()
