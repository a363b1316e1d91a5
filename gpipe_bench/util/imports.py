"""What the import statements of a file name, found without running it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

_BLOCKS: Final = ("body", "orelse", "finalbody", "handlers", "cases")
"""Where a statement has others."""


@cache
def imported_names(package: str, source: bytes) -> tuple[tuple[str, ...], ...]:
    """For each name that is imported anywhere in a file, the modules that it may stand for, the likelier first.

    Imports for annotations alone (``if TYPE_CHECKING:``) are left out: they never run.

    Args:
        package: the package of the file, against which relative imports count.
        source: its text.

    Raises:
        SyntaxError: the file is no Python.
        ImportError: a relative import leaves the package.
    """
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
