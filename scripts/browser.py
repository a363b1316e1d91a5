"""A browser without a window, and a server for what it shows: for tests of pages, and to time them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer, SimpleHTTPRequestHandler
from threading import Thread
from typing import Any, Final

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_QUIET: Final = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def browser_path() -> str | None:
    """The browser that ``GPIPE_BENCH_BROWSER`` names, or the first one in PATH; None without any."""
    return os.environ.get("GPIPE_BENCH_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def opened_browser() -> Iterator[Any]:
    """Playwright's object of a browser.

    Raises:
        RuntimeError: there is none.
    """
    from playwright.sync_api import sync_playwright

    path = browser_path()
    if path is None:
        names = ", ".join(BROWSERS)
        raise RuntimeError(f"PATH must have one of {names}, got none of them; scripts/install_browser.sh installs one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_QUIET)
        yield browser
        browser.close()


@contextmanager
def served(server: HTTPServer) -> Iterator[str]:
    """The address of a server that answers meanwhile."""
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Quiet(SimpleHTTPRequestHandler):
    """Files of a folder, without a line for each request."""

    def log_message(self, *_: object) -> None:
        """Nothing."""
