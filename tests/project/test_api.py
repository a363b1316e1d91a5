"""The reference of the API is what docstrings say, and docs import from the modules that it lists alone."""

from __future__ import annotations

import ast
import importlib
import inspect
import re

import pytest

from scripts.api import FOLDER, PUBLIC, pages
from tests.project.pages import PAGES, blocks
from tests.project.tree import ROOT


def test_pages_are_those_of_the_docstrings():
    found = {f"{FOLDER}/{path.name}": path.read_text(encoding="utf-8") for path in (ROOT / FOLDER).iterdir()}
    assert found == pages(), "run: make tables"


def test_marks_of_docstrings_are_translated():
    for text in pages().values():
        assert not any(mark in text for mark in ("``f", "::\n", ":func:", ":class:", " at 0x", "ForwardRef"))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_an_entry(module):
    text = "".join(pages().values())
    own = text.partition(f"\n## `{module}`\n")[2].partition("\n## ")[0]
    names = {line.removeprefix("### ") for line in own.splitlines() if line.startswith("### ")}
    assert names == {name for name in importlib.import_module(module).__all__ if not name.startswith("_")}


def test_every_argument_is_explained_or_evident():
    """A function that has a section of arguments leaves none out."""
    missing = []
    for module in map(importlib.import_module, PUBLIC):
        for name in module.__all__:
            value = getattr(module, name)
            words = inspect.getdoc(value) or ""
            if inspect.isroutine(value) and "\nArgs:\n" in words:
                missing += [
                    f"{name}.{each}" for each in inspect.signature(value).parameters if f" {each}: " not in words
                ]
    assert missing == []


@pytest.mark.parametrize("page", pages())
def test_entries_lead_to_public_names_alone(page):
    """A reader of the reference can look up every name of the package that it mentions."""
    for name in set(re.findall(r"gpipe_bench(?:\.\w+)+", pages()[page])):
        module = max((one for one in PUBLIC if name == one or name.startswith(f"{one}.")), key=len)
        own, *_ = [*name.removeprefix(module).split(".")[1:], ""]
        assert not own or own in importlib.import_module(module).__all__, name


def test_docs_and_examples_import_public_names_alone():
    programs = {str(path.relative_to(ROOT)): [path.read_text()] for path in (ROOT / "examples").rglob("*.py")}
    assert programs
    deep = []
    for page, found in {**{page: blocks(text, "python") for page, text in PAGES.items()}, **programs}.items():
        for block in found:
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.Import):
                    names = [(alias.name, "") for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [(node.module or "", alias.name) for alias in node.names]
                else:
                    continue
                for module, name in names:
                    if module.partition(".")[0] == "gpipe_bench":
                        known = module in PUBLIC and (not name or name in importlib.import_module(module).__all__)
                        deep += [] if known else [f"{page}: {module} {name}"]
    assert deep == []
