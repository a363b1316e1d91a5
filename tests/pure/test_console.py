"""A table loses nothing where it is wider than the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gpipe_bench.util.console import Column, Grid, output


def printed(grid, width):
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(grid)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def grid(**options):
    columns = [Column("key", text=True), Column("a"), Column("b\n[GiB]"), Column("c", **options), Column("none")]
    found = Grid(columns, "title")
    found.add("x", "1.25", "22.5 [1, 2]", "3", "")
    return found


def test_what_fits_is_one_table_without_empty_columns():
    assert printed(grid(), 40) == [
        "title",
        "                     b",
        "key     a        [GiB]  c",
        "x    1.25  22.5 [1, 2]  3",
    ]


def test_what_does_not_fit_is_in_parts_with_the_key():
    assert printed(grid(), 22) == [
        "title",
        "                     b",
        "key     a        [GiB]",
        "x    1.25  22.5 [1, 2]",
        "",
        "key  c",
        "x    3",
    ]


def test_a_part_may_begin_at_a_column():
    assert printed(grid(starts_part=True), 22)[-2:] == ["key  c", "x    3"]
    assert len(printed(grid(starts_part=True), 80)) == 4


@pytest.mark.parametrize("width", [20, 30, 80])
def test_a_long_key_is_folded_and_no_number_is(width):
    found = Grid([Column("balance", text=True), Column("a"), Column("b")])
    found.add("1-2-" * 40, "1" * 9, "2" * 9)
    lines = printed(found, width)
    assert max(map(len, lines)) <= width
    assert {"1" * 9, "2" * 9} <= set(" ".join(lines).split())
    folded = "".join(word for line in lines for word in line.split() if "-" in word)
    assert folded.startswith("1-2-" * 40)


def test_brackets_are_no_markup():
    found = Grid([Column("[bold]key", text=True)])
    found.add("[red]x[/]")
    assert printed(found, 40) == ["[bold]key", "[red]x[/]"]


def test_a_table_without_rows_is_its_title():
    assert printed(Grid([Column("a", text=True)], "title"), 40) == ["title"]


def test_a_pipe_has_no_limit_but_that_of_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert output().width > 1000
    monkeypatch.setenv("COLUMNS", "80")
    assert output().width == 80
