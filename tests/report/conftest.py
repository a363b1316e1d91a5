"""Invented results of two experiments, their page, and a headless browser to open it in."""

from __future__ import annotations

import os
import shutil

import pytest

from gpipe_bench.report.page import write_report
from tests.figures.synthetic import (
    ablation_row,
    cpu_ablation,
    event_records,
    published_ablation,
    step_events,
    write_csv,
    write_events,
    write_rows,
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Nothing but the page: no look-ups of its maker's hosts, no sandbox inside a container.
QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="244.8pt" height="100pt"><rect width="9" height="9"/></svg>'
SETTING = {"config_sha256": "", "throughput_samples_per_s": 12.5, "step_time_ms": 80.0}
SIMULATED = {"evidence": "simulated", "device": "cuda Imaginary H9", "device_count": 4, "profile": "h9", "repeat": None}


def simulated_rows():
    names = {"baseline": "a" * 64, "dep-str-ptl": "b" * 64}
    return [
        ablation_row(name, **{**SIMULATED, **SETTING, "config_sha256": digest, "commit": "c" * 40})
        for name, digest in names.items()
    ]


def simulated_events():
    slow = step_events(8, 4, copies=False, device="cuda", unit_us=2000)
    fast = step_events(8, 4, copies=True, device="cuda")
    return [
        *event_records(slow, "baseline", cell="net-baseline-aaaaaaaa", evidence="simulated"),
        *event_records(fast, "dep-str-ptl", cell="net-dep-str-ptl-bbbbbbbb", evidence="simulated"),
    ]


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """``results``, ``figures`` and ``captions``, side by side."""
    place = tmp_path_factory.mktemp("suite")
    folder = place / "results"
    folder.mkdir()
    measured = cpu_ablation()
    write_rows(folder / "ablation.csv", [*published_ablation(), *simulated_rows(), *measured])
    own = event_records(step_events(4, 4, copies=False), "dep-x-x", cell="net-dep-x-x-cccccccc")
    write_events(folder / "ablation_events.csv", [*simulated_events(), *own])
    write_csv(folder / "predictions.csv", ["metric", "simulated"], [{"metric": "<b>&", "simulated": "1.23456789"}])
    (place / "figures").mkdir()
    for name in ("ablation", "ablation_shares", "timeline_dep-x-x", "stray"):
        (place / "figures" / f"{name}.svg").write_text(SVG)
    (place / "captions").mkdir()
    (place / "captions" / "shares.rst").write_text("What *each* brings. Rows: ``{{ snakemake.input.rows }}``.\n")
    (place / "captions" / "timeline.rst").write_text("One step of {{ snakemake.wildcards.variant }}.\n")
    return place


@pytest.fixture(scope="session")
def page(results):
    """The report of the invented results."""
    out = results / "out" / "report.html"
    return write_report(results / "results", results / "figures", results / "captions", out)


@pytest.fixture(scope="session")
def browser():
    """A headless browser, closed at the end; skips where none is installed."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("GPIPE_BENCH_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} in PATH; scripts/install_browser.sh installs one")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture
def tab(browser, page):
    """The page in a fresh tab without a network; what it complains of or asks for is in ``tab.faults``."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    opened = context.new_page()
    opened.faults = []
    opened.on("console", lambda message: opened.faults.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: opened.faults.append(f"error: {error}"))
    opened.on("request", lambda request: opened.faults.append(request.url) if "://" in request.url[4:9] else None)
    opened.goto(page.as_uri())
    opened.faults = [fault for fault in opened.faults if fault != page.as_uri()]
    # The mouse reaches only what the window shows; some tests turn the wheel once without zooming.
    opened.evaluate("window.scrollTo(0, document.getElementById('timeline').offsetTop - 200)")
    yield opened
    context.close()
