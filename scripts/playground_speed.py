"""How fast the page of the playground draws: ``python -m scripts.playground_speed [--pyodide FOLDER] [--repeats 20]``.

Each repeat sets another T_F, whose answers no cache has, for 8 devices and 32 micro-batches. The table has the ms
from the new setting until the shown schedule is drawn, and until all are; the page's own clock takes them. With
Pyodide, fresh tabs tell when the page is drawn, and when Python is up. Median, least and most: the machine counts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any, Final

from gpipe_bench.playground.page import export
from gpipe_bench.playground.server import local_server
from scripts.browser import Quiet, opened_browser, served

_SETTINGS: Final = "#p=8&m=32"
# When an attribute of the page's body appeared, in milliseconds from the start of its loading.
_WATCH: Final = """
window.seen = {};
new MutationObserver(() => {
  for (const name of ["drawn", "start"]) if (document.body?.dataset[name]) window.seen[name] ??= performance.now();
}).observe(document, { subtree: true, attributes: true, attributeFilter: ["data-drawn", "data-start"] });
"""


def redrawn(browser: Any, address: str, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of the shown schedule and of all, for each repeat."""
    tab = browser.new_page()
    tab.goto(address + _SETTINGS)
    tab.wait_for_selector("body[data-drawn][data-start]", timeout=120_000)
    found: dict[str, list[float]] = {"shown schedule": [], "all schedules": []}
    for repeat in range(repeats):
        drawn = int(tab.evaluate("document.body.dataset.drawn"))
        tab.fill("[name=forward]", f"{1 + (repeat + 1) / 1000:.3f}")
        tab.wait_for_function("count => Number(document.body.dataset.drawn) > count", arg=drawn, timeout=120_000)
        for name, key in zip(found, ("first", "ms"), strict=True):
            found[name].append(float(tab.evaluate(f"document.body.dataset.{key}")))
    tab.close()
    return found


def opened(browser: Any, address: str, repeats: int) -> dict[str, list[float]]:
    """Milliseconds from loading the page, in a fresh profile each, until it is drawn and until Python is up."""
    found: dict[str, list[float]] = {"page drawn": [], "Python up": []}
    for _ in range(repeats):
        context = browser.new_context()
        tab = context.new_page()
        tab.add_init_script(_WATCH)
        tab.goto(address)
        tab.wait_for_selector("body[data-drawn][data-start]", timeout=120_000)
        seen = tab.evaluate("window.seen")
        for name, key in zip(found, ("drawn", "start"), strict=True):
            found[name].append(seen[key])
        context.close()
    return found


def table(engine: str, found: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Lines of the table: median, least and most."""
    for name, times in found.items():
        yield f"| {engine} | {name} | {median(times):.0f} | {min(times):.0f} to {max(times):.0f} |"


def main(pyodide: Path | None, repeats: int) -> None:
    """Measure and print."""
    print("| engine | what | ms, median | least to most |\n|---|---|---:|---|")
    with opened_browser() as browser, tempfile.TemporaryDirectory() as folder:
        with served(local_server(0)) as address:
            print(*table("local server", redrawn(browser, address, repeats)), sep="\n")
        if pyodide is not None:
            export(Path(folder), pyodide)
            handler = partial(Quiet, directory=folder)
            with served(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as address:
                print(*table("Pyodide", opened(browser, address, max(repeats // 4, 1))), sep="\n")
                print(*table("Pyodide", redrawn(browser, address, repeats)), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m scripts.playground_speed")
    parser.add_argument("--pyodide", type=Path, help="folder of npm's package pyodide")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    main(given.pyodide, given.repeats)
