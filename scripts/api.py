"""The pages ``docs/api/*.md``: what each wing of the package exports, from its docstrings.

Docstrings are in Google's style with roles of Sphinx. They become Markdown: a section is a list, ``:func:`x``` is code.
(Refused: griffe and pdoc, a dependency each; modules that load their names late have to be imported anyway.)
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

FOLDER: Final = "docs/api"


@dataclass(frozen=True)
class Wing:
    """A page: its modules, and what it says about them."""

    title: str
    modules: tuple[str, ...]
    guide: str


WINGS: Final[Mapping[str, Wing]] = {
    "engine": Wing(
        "engine",
        ("gpipe_bench", "gpipe_bench.balance", "gpipe_bench.skip", "gpipe_bench.models", "gpipe_bench.errors"),
        "[Training](../training.md), [skips](../skips.md) and [models](../models.md) show how to use it.",
    ),
    "schedules": Wing("schedules", ("gpipe_bench.schedules",), "[Schedules](../schedules.md) shows how to use it."),
    "simulator": Wing("simulator", ("gpipe_bench.simulator",), "[Simulator](../simulator.md) shows how to use it."),
    "emulator": Wing("emulator", ("gpipe_bench.emulator",), "[Emulator](../emulator.md) shows how to use it."),
    "distributed": Wing(
        "distributed", ("gpipe_bench.distributed",), "[Distributed](../distributed.md) shows how to use it."
    ),
}
"""By the name of its page."""

PUBLIC: Final = tuple(module for wing in WINGS.values() for module in wing.modules)
"""Modules whose names are public; docs import from no other."""

_WIDTH: Final = 100
_SECTION: Final = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Warns):")
_TITLES: Final = {"Args": "Arguments"}


def pages() -> dict[str, str]:
    """The text of each page by its path."""
    return {f"{FOLDER}/{name}.md": "\n".join(_page(wing)) + "\n" for name, wing in WINGS.items()}


def _page(wing: Wing) -> Iterator[str]:
    yield f"# Reference: {wing.title}"
    yield ""
    yield f"Generated from docstrings by `make tables`. {wing.guide}"
    for name in wing.modules:
        module = importlib.import_module(name)
        yield ""
        yield f"## `{name}`"
        yield ""
        yield _words((module.__doc__ or "").partition("\n")[0])
        for export in sorted(module.__all__, key=str.lower):
            if not export.startswith("_"):
                yield from _entry(module, export)


def _entry(module: Any, name: str) -> Iterator[str]:
    value = getattr(module, name)
    yield ""
    yield f"### {name}"
    yield ""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        shown = ", ".join(map(str, value)) if isinstance(value, Mapping | tuple) else repr(value)
        yield _constant_doc(module, name)
        yield ""
        yield f"It has {shown}." if isinstance(value, Mapping | tuple) else f"It is `{shown}`."
        return
    yield from _fenced(_signature(name, value))
    yield from _markdown(inspect.getdoc(value) or "")
    if inspect.isclass(value):
        for method, member in vars(value).items():
            yield from _member(name, method, member)


def _member(owner: str, name: str, member: Any) -> Iterator[str]:
    """A method or property that a class defines itself."""
    bound = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if name.startswith("_") or not (inspect.isfunction(bound) or isinstance(bound, property)) or not bound.__doc__:
        return
    yield ""
    yield f"#### {owner}.{name}"
    yield ""
    if inspect.isfunction(bound):
        yield from _fenced(_signature(name, bound, method=not isinstance(member, staticmethod)))
    yield from _markdown(inspect.getdoc(bound) or "")


def _signature(name: str, value: Any, *, method: bool = False) -> str:
    """As in the source: annotations are strings there."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        private = [base for base in value.__bases__ if base.__name__.startswith("_")]
        bases = [base for base in value.__bases__ if base not in private]
        bases += [base for hidden in private for base in hidden.__bases__]
        return f"class {name}({', '.join(base.__name__ for base in bases)})"
    found = inspect.signature(value)
    parameters = list(found.parameters.values())[method:]
    arguments: list[str] = []
    for before, parameter in zip([None, *parameters], parameters, strict=False):
        keyword = parameter.kind is parameter.KEYWORD_ONLY
        if keyword and (before is None or before.kind not in {before.KEYWORD_ONLY, before.VAR_POSITIONAL}):
            arguments.append("*")
        arguments.append(_argument(parameter))
    end = "" if inspect.isclass(value) or found.return_annotation is found.empty else f" -> {found.return_annotation}"
    line = f"{name}({', '.join(arguments)}){end}"
    listed = "".join(f"    {argument},\n" for argument in arguments)
    return line if len(line) <= _WIDTH else f"{name}(\n{listed}){end}"


def _argument(parameter: inspect.Parameter) -> str:
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else "*" * (parameter.kind is parameter.VAR_POSITIONAL)
    # A NamedTuple has no strings, but ForwardRefs of them.
    annotation = getattr(parameter.annotation, "__forward_arg__", parameter.annotation)
    typed = "" if annotation is parameter.empty else f": {annotation}"
    if parameter.default is parameter.empty:
        return f"{stars}{parameter.name}{typed}"
    default = repr(parameter.default)
    if isinstance(parameter.default, type):
        default = parameter.default.__name__
    elif "(" in default and parameter.default == type(parameter.default)():
        default = f"{type(parameter.default).__name__}()"
    return f"{parameter.name}{typed} = {default}" if typed else f"{parameter.name}={default}"


def _constant_doc(module: Any, name: str) -> str:
    """The string below a constant, in the module that the package imports it from."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return _constant_doc(importlib.import_module(node.module or ""), name)
    body = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body
    for node, after in pairwise(body):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == name and isinstance(after, ast.Expr):
            return _words(inspect.cleandoc(ast.literal_eval(after.value)))
    raise ValueError(f"{module.__name__}.{name} must have a docstring below it, got none; write what it is")


def _markdown(text: str) -> Iterator[str]:
    """A docstring: paragraphs and code, then its sections as lists."""
    parts = re.split(rf"^{_SECTION.pattern}\n", text, flags=re.MULTILINE)
    yield from _prose(parts[0].strip("\n"))
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        yield ""
        yield f"**{_TITLES.get(title, title)}**"
        yield ""
        own = dedent(body.strip("\n"))
        if title in {"Returns", "Yields"}:
            yield from _prose(own)
            continue
        for entry in re.split(r"\n(?=\S)", own):
            name, _, meaning = entry.partition(":")
            names = ", ".join(f"`{each.strip()}`" for each in name.split(","))
            yield f"- {names}: {_words(' '.join(meaning.split()))}"


def _prose(text: str) -> Iterator[str]:
    for index, block in enumerate(text.split("\n\n")):
        if block == "::":
            continue
        if index:
            yield ""
        if block.startswith(" "):
            yield from _fenced(dedent(block))
        else:
            yield _words(re.sub("::$", ":", block))


def _fenced(code: str) -> Iterator[str]:
    yield "```python"
    yield from code.splitlines()
    yield "```"
    yield ""


def _words(text: str) -> str:
    """Inline marks of a docstring as Markdown."""
    text = re.sub(r":\w+:`(?:[^`<]*<)?~?([^`>]+)>?`", r"`\1`", text)
    return text.replace("``", "`")
