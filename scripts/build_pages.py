"""Build what is published as pages: the docs as HTML, the report of the reference results, and the playground.

    python -m scripts.build_pages site [--pyodide node_modules/pyodide]

README becomes the first page. Links between pages stay links between pages; links to files of the repository lead to
the repository. Nothing is downloaded. markdown-it-py comes with rich, and the lock pins it.
"""

from __future__ import annotations

import argparse
import html
import re
import shutil
from collections.abc import Iterator
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from posixpath import normpath
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

from gpipe_bench.playground.page import export
from gpipe_bench.report.page import write_report
from scripts.table_contents import ROOT

REPOSITORY: Final = "https://github.com/gpipe-bench/gpipe_bench/blob/main"
_SHELL: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">
<title>{title}</title><style>{style}</style></head><body>
<nav><a href="{up}index.html">gpipe_bench</a> <a href="{up}docs/README.html">docs</a>
<a href="{up}report.html">report</a> <a href="{up}playground/index.html">playground</a></nav>
<main>
{body}</main></body></html>
"""
_STYLE: Final = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.55 system-ui,'DejaVu Sans',sans-serif;max-width:56rem;margin:0 auto;"
    "padding:1rem}nav{display:flex;flex-wrap:wrap;gap:1rem;margin-bottom:1.5rem}a{color:light-dark(#0068a6,#7cc0f2)}"
    "pre,table{overflow-x:auto;display:block;max-width:100%}pre,code{background:light-dark(#f4f4f4,#232323);"
    "font-size:.9em}pre{padding:.7rem}code{overflow-wrap:anywhere}th,td{padding:.2rem .6rem;text-align:left;"
    "border-bottom:1px solid light-dark(#d9d9d9,#3d3d3d)}img{max-width:100%;height:auto;background:#fff}"
)


def build(out: Path, pyodide: Path | None = None) -> None:
    """Write all pages.

    Args:
        out: the folder; what else is in it stays.
        pyodide: the folder of npm's package ``pyodide``; without it the playground has no Python.
    """
    names = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
    for name in names:
        path = out / page_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(name, names), encoding="utf-8")
    for folder in ("docs/pictures", "figures/reference"):
        shutil.copytree(ROOT / folder, out / folder, ignore=shutil.ignore_patterns("*.pdf"), dirs_exist_ok=True)
    report = out.resolve() / "report.html"
    with chdir(ROOT):  # The report names its tables as they are given: without the folder of this checkout.
        write_report(Path("results/reference"), None, report)
    export(out / "playground", pyodide)


def page_of(name: str) -> str:
    """The page that a Markdown file becomes."""
    return "index.html" if name == "README.md" else f"{name.removesuffix('.md')}.html"


def page(name: str, names: list[str]) -> str:
    """A Markdown file as HTML.

    Args:
        name: below the root of the repository.
        names: of all Markdown files that become pages.
    """
    markdown = MarkdownIt("commonmark").enable("table")
    tokens = markdown.parse((ROOT / name).read_text(encoding="utf-8"))
    _set_anchors(tokens)
    for token in _links(tokens):
        where = "src" if token.type == "image" else "href"
        token.attrSet(where, target(str(token.attrGet(where)), name, names))
    title = next((tokens[k + 1].content for k, token in enumerate(tokens) if token.type == "heading_open"), name)
    body = markdown.renderer.render(tokens, markdown.options, {})
    return _SHELL.format(title=html.escape(title), style=_STYLE, up="../" * name.count("/"), body=body)


def target(link: str, name: str, names: list[str]) -> str:
    """Where a link of a Markdown file leads on its page."""
    path, _, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:", link):
        return link
    folder, end = name.rpartition("/")[0], f"#{anchor}" if anchor else ""
    there = normpath(f"{folder}/{path}" if folder else path)
    up = "../" * name.count("/")
    if there in names:
        return f"{up}{page_of(there)}{end}"
    if there.startswith(("docs/pictures/", "figures/reference/")) and not there.endswith(".pdf"):
        return f"{up}{there}"
    return f"{REPOSITORY}/{there}{end}"


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def _set_anchors(tokens: list[Token]) -> None:
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrSet("id", slug(inline.content))


def _links(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        if token.type in ("link_open", "image"):
            yield token
        yield from _links(token.children or [])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m scripts.build_pages", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the pages")
    parser.add_argument(
        "--pyodide", type=Path, help="folder of npm's package pyodide, which the playground runs Python by"
    )
    given = parser.parse_args()
    build(given.out, given.pyodide)
