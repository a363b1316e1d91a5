"""Progress of long commands on stderr: a live line on a terminal, elsewhere a plain line now and then.

Computing code knows nothing of the terminal: it calls ``step`` between its pieces, never inside what is timed. No
thread refreshes the line: it would run beside what is measured, and could not be forked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

_EVERY_S: Final = 60.0
"""Seconds between two plain lines, at least: the logs of a workflow stay readable."""


class Progress:
    """One long piece of work that is under way.

    Args:
        what: what is done, such as ``simulating``.
        live: the line of a terminal; without one there are plain lines.
    """

    def __init__(self, what: str, live: Live | None) -> None:
        self._what, self._live = what, live
        self._start = self._said = time.monotonic()
        if live is not None:
            self._draw(what)

    def step(self, done: int, total: int, detail: str = "") -> None:
        """Show how many steps are done, what is done now, the time that was used and about what remains."""
        now = time.monotonic()
        used = now - self._start
        text = f"{self._what}{f' {detail}' if detail else ''}: {done} of {total}, {_time(used)} used"
        if 0 < done < total:
            text += f", about {_time(used / done * (total - done))} left"
        if self._live is not None:
            self._draw(text)
        elif now - self._said >= _EVERY_S:
            self._said = now
            typer.echo(text, err=True)

    def line(self, text: str, *, err: bool = False) -> None:
        """Print a line that stays, above the live line."""
        if self._live is None:
            typer.echo(text, err=err)
            return
        self._live.update(Text(), refresh=True)
        typer.echo(text, err=err)

    def _draw(self, text: str) -> None:
        if self._live is not None:
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """Show progress on stderr while the block runs; nothing of it is left on a terminal.

    Args:
        what: what is done, such as ``simulating``.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield Progress(what, None)
        return
    with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
        yield Progress(what, live)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
