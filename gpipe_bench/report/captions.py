"""Captions of figures: reStructuredText with Jinja, the same files that Snakemake's own report takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docutils.core import publish_parts
from jinja2 import ChainableUndefined, Environment
from markupsafe import Markup


def caption(folder: Path, stem: str, experiment: str, table: Path | None) -> Markup:
    """The caption of a figure as HTML; empty where there is none.

    Args:
        folder: holds ``<name>.rst``: named like the figure, or like the part after or before a ``_`` in its name.
        stem: name of the figure, such as ``ablation_shares`` or ``timeline_dep-x-x``.
        experiment: name of the experiment, for captions that speak of it.
        table: the table of rows that the figure shows, for captions that name it; None where it is not known.
    """
    path = next((path for path in (folder / f"{name}.rst" for name in _names(stem)) if path.is_file()), None)
    if path is None:
        return Markup("")
    rest = stem.partition("_")[2]
    words = {
        "input": {"rows": str(table)} if table else {},
        "wildcards": {"variant": rest, "experiment": experiment, "model": rest, "sweep": rest},
    }
    # The captions are files of this project, and what they give goes through docutils, which escapes it.
    template = Environment(undefined=ChainableUndefined).from_string(path.read_text(encoding="utf-8"))  # noqa: S701
    return Markup(_html(template.render(snakemake=words)))  # noqa: S704


def _names(stem: str) -> Iterator[str]:
    """``a_b_c``: itself, then ``b_c``, ``c``, ``a_b``, ``a``."""
    parts = stem.split("_")
    yield from ("_".join(parts[start:]) for start in range(len(parts)))
    yield from ("_".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))


def _html(text: str) -> str:
    settings = {"file_insertion_enabled": False, "raw_enabled": False, "report_level": 5, "_disable_config": True}
    parts = publish_parts(text, writer="html5", settings_overrides=settings)
    return str(parts["body"]).strip()
