"""What the import statements of files name, found without running them."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

_BLOCKS: Final = ("body", "orelse", "finalbody", "handlers", "cases")
"""Where a statement has others."""


def import_closure(first: Mapping[str, Path], find: Callable[[str], Path | None]) -> dict[str, Path]:
    """Name and file of some modules, which come first, and of all that they import, at any remove.

    Args:
        first: files of modules by their dotted names.
        find: the file of a module; None for one that does not count.
    """
    found, waiting = dict(first), list(first)
    while waiting:
        name = waiting.pop()
        # The package above a module runs when it is imported.
        for other in (name.rpartition(".")[0], *imported_modules(name, found[name], find)):
            if other and other not in found and (path := find(other)) is not None:
                found[other] = path
                waiting.append(other)
    return found


def imported_modules(name: str, path: Path, find: Callable[[str], Path | None]) -> list[str]:
    """The modules that the import statements of a file name, anywhere in it; those that ``find`` knows.

    Imports for annotations alone (``if TYPE_CHECKING:``) are left out: they never run. A file that is no Python, or
    whose relative imports leave their package, imports nothing.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    try:
        named = _imported_names(package, path.read_bytes())
    except (SyntaxError, ValueError, ImportError):
        return []  # importing it says what is wrong
    targets = (next(filter(find, names), None) for names in named)
    return list(dict.fromkeys(target for target in targets if target))


@cache
def _imported_names(package: str, source: bytes) -> tuple[tuple[str, ...], ...]:
    """For each name that is imported in a file of a package, the modules that it may stand for, the likelier first."""
    found: list[tuple[str, ...]] = []
    for node in _running(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name,) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found += [(f"{base}.{alias.name}", base) for alias in node.names]
    return tuple(found)


def _running(node: Any) -> Iterator[ast.AST]:
    """The statements below ``node`` but for what stands under ``if TYPE_CHECKING:``."""
    skipped = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    for block in _BLOCKS[1:] if skipped else _BLOCKS:
        for child in getattr(node, block, ()):
            yield child
            yield from _running(child)
