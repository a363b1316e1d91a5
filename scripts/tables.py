"""Write the tables of README and docs from the reference results, the leaderboard, pages of columns and API.

    python -m scripts.tables            write them into their pages
    python -m scripts.tables --check    exit status 1 where they are not what the results give

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; the text between the marks is replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from scripts import api, columns, leaderboard
from scripts.table_contents import ROOT, TABLES

PAGES: Final = (
    "README.md",
    "docs/claims.md",
    "docs/leaderboard.md",
    "docs/paper.md",
    "docs/peers.md",
    "docs/reproduce.md",
    "docs/residuals.md",
    "docs/results.md",
    "docs/schedules_compared.md",
    "docs/simulator_errors.md",
)
"""Pages with tables. Each table of ``TABLES`` stands on exactly one of them."""

_BLOCK: Final = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(pages: Mapping[str, str]) -> dict[str, str]:
    """The text of each page with its tables as the reference results give them.

    Raises:
        ValueError: a table is unknown, missing, or there twice.
    """
    names = [found.group(2) for text in pages.values() for found in _BLOCK.finditer(text)]
    if sorted(names) != sorted(TABLES):
        raise ValueError(f"tables must be {', '.join(TABLES)}, each once, got {', '.join(names)}; mend the marks")
    made = {name: table() for name, table in TABLES.items()}
    return {
        page: _BLOCK.sub(lambda found: f"{found.group(1)}\n{made[found.group(2)]}\n{found.group(3)}", text)
        for page, text in pages.items()
    }


def read_pages() -> dict[str, str]:
    """The pages with tables as they are now, and the generated ones that there are."""
    names = (*PAGES, columns.PAGE, leaderboard.CSV)
    pages = [*(ROOT / name for name in names), *sorted((ROOT / api.FOLDER).glob("*.md"))]
    return {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in pages if page.is_file()}


def main(arguments: Sequence[str]) -> int:
    """Write or check; exit status 2 for an unknown option."""
    if unknown := [word for word in arguments if word != "--check"]:
        print(f"option must be --check or none, got {unknown[0]}", file=sys.stderr)
        return 2
    pages = read_pages()
    whole = {columns.PAGE: columns.page(), leaderboard.CSV: leaderboard.leaders_csv(), **api.pages()}
    wanted = {**rendered(pages), **whole}
    changed = [page for page in wanted if pages.get(page) != wanted[page]]
    if not changed:
        print(f"{', '.join(wanted)}: tables are those of results/reference")
    elif arguments:
        print(f"{', '.join(changed)}: tables differ from results/reference; write them: make tables", file=sys.stderr)
    else:
        for page in changed:
            (ROOT / page).write_text(wanted[page], encoding="utf-8")
        print(f"wrote the tables of {', '.join(changed)}")
    return 1 if changed and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
