"""The page ``docs/columns.md``: every column of every table, from the schema of the package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpipe_bench.results.schema import TABLES, Field

PAGE: Final = "docs/columns.md"
_HEAD: Final = """\
# Columns

Generated from [`gpipe_bench/results/schema.json`](../gpipe_bench/results/schema.json) by `make tables`;
`datapackage.json` beside the results says the same to programs. [Results](results.md) says how they belong together.

## Tables

| table | one line is | its key |
|---|---|---|
"""
_COLUMNS: Final = """
## Every column

A column that means something else in one table has a line of its own there.

| column | type | unit | meaning | in |
|---|---|---|---|---|
"""


def page() -> str:
    """The text of the page."""
    tables = "".join(
        f"| `{table.name}` | {table.line} | {', '.join(f'`{name}`' for name in table.key) or 'none'} |\n"
        for table in TABLES.values()
    )
    return f"{_HEAD}{tables}{_COLUMNS}{''.join(_lines())}"


def _lines() -> Iterator[str]:
    for name in sorted({name for table in TABLES.values() for name in table.fields}):
        homes: dict[str, tuple[Field, list[str]]] = {}
        for table in TABLES.values():
            if field := table.fields.get(name):
                homes.setdefault(repr(field), (field, []))[1].append(table.name)
        for field, where in homes.values():
            meaning = f"{field['description']}{_limits(field)}".replace("|", "\\|")
            yield f"| `{name}` | {field['type']} | {field.get('unit', '')} | {meaning} | {', '.join(where)} |\n"


def _limits(field: Field) -> str:
    limits = field.get("constraints", {})
    words = [f"one of {', '.join(limits['enum'])}"] if "enum" in limits else []
    return f" ({words[0]})" if words and not all(value in field["description"] for value in limits["enum"]) else ""
