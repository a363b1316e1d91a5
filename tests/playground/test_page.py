"""The page in a real browser, with a local server and as static files with Python in the page; and who gets answers."""

from __future__ import annotations

import http.client
import json
from functools import partial
from http.server import ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from gpipe_bench.cli import application
from gpipe_bench.errors import ScheduleError
from gpipe_bench.playground.page import export
from gpipe_bench.playground.questions import ask
from gpipe_bench.playground.server import local_server
from gpipe_bench.schedules import check, moved, named_schedule, read_csv, timing, to_csv
from scripts.browser import BROWSERS, Quiet, browser_path, opened_browser, served
from scripts.playground_speed import redrawn, table
from tests.playground.pyodide import NO_PYODIDE, pyodide_folder

# Of the large timeline: the left end of the axis of time, what lies from lane to lane, and the first lane's middle.
LEFT, PITCH, MIDDLE = 22, 46, 12


@pytest.fixture(scope="module")
def port():
    server = local_server(0)
    with served(server):
        yield server.server_address[1]


def answered(port, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, {"Host": f"127.0.0.1:{port}", **headers})
    got = connection.getresponse()
    content = got.read()
    connection.close()
    return got.status, content


JSON = {"Content-Type": "application/json"}
NAMES = b'{"ask":"names"}'


def test_the_server_answers_questions_of_its_own_page(port):
    assert answered(port, "POST", "/ask", NAMES, **JSON) == (200, ask(NAMES.decode()).encode())
    assert answered(port, "POST", "/ask", NAMES, **JSON, Host=f"localhost:{port}")[0] == 200
    status, page = answered(port, "GET", "/")
    assert status == 200
    assert b"Pipeline playground" in page
    assert answered(port, "GET", "/timeline.js")[0] == 200


@pytest.mark.parametrize(
    "request_",
    [
        {"method": "POST", "path": "/ask", "body": NAMES, **JSON, "Host": "evil.example"},
        {"method": "POST", "path": "/ask", "body": NAMES, "Content-Type": "text/plain"},
        {"method": "POST", "path": "/ask", "body": NAMES},
        {"method": "POST", "path": "/", "body": NAMES, **JSON},
        {"method": "POST", "path": "/ask", "body": b"", **JSON, "Content-Length": "-1"},
        {"method": "POST", "path": "/ask", "body": b"", **JSON, "Content-Length": "1000001"},
    ],
)
def test_the_server_answers_nobody_else(port, request_):
    assert answered(port, **request_) == (403, b"")


@pytest.mark.parametrize("path", ["/../questions.py", "/page.html", "/nope.js", "//etc/passwd"])
def test_the_server_has_the_files_of_the_page_alone(port, path):
    assert answered(port, "GET", path)[0] == 404
    assert answered(port, "GET", "/", Host="evil.example")[0] == 404


def test_a_port_that_is_taken_is_refused(port):
    for other in (port, 70_000):
        done = CliRunner().invoke(application(["playground"]), ["playground", "--no-browser", "--port", str(other)])
        assert done.exit_code == 1
        assert f"--port must be one that is free, got {other}" in str(done.exception)


def test_the_page_is_written_as_files_without_a_download(tmp_path):
    words = ["playground", "--export", str(tmp_path / "site")]
    done = CliRunner().invoke(application(["playground"]), words)
    assert done.exit_code == 0, done.output
    assert "npm install pyodide" in done.output
    (tmp_path / "npm").mkdir()
    done = CliRunner().invoke(application(["playground"]), [*words, "--pyodide", str(tmp_path / "npm")])
    assert "without pyodide.mjs" in str(done.exception)
    text = "".join(path.read_text() for path in (tmp_path / "site").iterdir() if path.suffix != ".zip")
    assert "https://" not in text


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if browser_path() is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} in PATH; scripts/install_browser.sh installs one")
    with opened_browser() as opened:
        yield opened


@pytest.fixture(params=["server", "pyodide"])
def address(request, tmp_path):
    if request.param == "server":
        yield f"http://127.0.0.1:{request.getfixturevalue('port')}/"
        return
    if pyodide_folder() is None:
        pytest.skip(NO_PYODIDE)
    export(tmp_path, pyodide_folder())
    with served(ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))) as own:
        yield own


class Page:
    """A tab with the page; ``faults`` are what its console says."""

    def __init__(self, browser, address, scheme="light"):
        size = {"width": 1280, "height": 1000}
        self.tab = browser.new_context(viewport=size, color_scheme=scheme, accept_downloads=True).new_page()
        self.faults = []
        self.tab.on("console", lambda message: self.faults.append(message.text))
        self.tab.on("pageerror", lambda error: self.faults.append(str(error)))
        self.tab.goto(address)
        self.drawn(1)

    def drawn(self, count):
        self.tab.wait_for_function("count => Number(document.body.dataset.drawn || 0) >= count", arg=count)

    @property
    def rounds(self):
        return int(self.tab.evaluate("document.body.dataset.drawn"))

    def says(self, start):
        self.tab.wait_for_function("start => document.querySelector('#reason').innerText.startsWith(start)", arg=start)
        return self.tab.inner_text("#reason")

    def drag(self, device, start, to_device, to, whole=33):
        """Take what a device does at a time to another time; it is dropped when the page knows where it may go."""
        box = self.tab.locator("#big").bounding_box()

        def place(time, lane):
            return box["x"] + LEFT + time / whole * (box["width"] - 1 - LEFT), box["y"] + lane * PITCH + MIDDLE

        self.tab.mouse.move(*place(start, device))
        self.tab.mouse.down()
        self.tab.mouse.move(*place(start + 0.4, device), steps=2)
        self.tab.mouse.move(*place(to, to_device), steps=4)
        self.tab.wait_for_selector("#big[data-reach]")
        self.tab.mouse.up()


@pytest.mark.timeout(120)
def test_schedules_are_compared_and_changed_by_hand(browser, address, tmp_path):
    page = Page(browser, address)
    tab = page.tab
    schedule = named_schedule("1f1b", 8, 4, 4)
    times = timing(schedule)
    assert tab.inner_text("#facts") == f"{times.makespan:g} time, {100 * times.bubble:.1f} % bubble, 4 activations"
    assert tab.locator(".one").count() == len(json.loads(ask('{"ask":"names"}'))["names"])
    assert "is the fastest that fits 4 activations" in tab.inner_text("#answer")

    # An illegal move is refused with the words of the checker: F(4,0), which starts at 12, to the first place.
    tab.wait_for_selector("body[data-start]")
    page.drag(0, 12.5, 0, 0.1)
    with pytest.raises(ScheduleError) as refused:
        moved(schedule, (0, 5), (0, 0))
    assert page.says("Refused") == f"Refused: {refused.value.problems[0]}"
    page.drag(0, 12.5, 2, 12.5)
    assert "a partition must be on one device" in page.says("Refused: a partition")

    # A legal one: F(4,0) before B(0,0). It is taken back, by key.
    count = page.rounds
    page.drag(0, 12.5, 0, 9.9)
    page.drawn(count + 1)
    assert page.says("Moved") == "Moved. The step takes as long as before: 33."
    assert tab.input_value("#shown") == "yours"
    assert tab.inner_text("#facts").endswith("5 activations, limit 4")
    tab.focus("#big")
    tab.keyboard.press("Shift+ArrowRight")
    page.drawn(count + 2)
    tab.keyboard.press("u")
    page.drawn(count + 3)
    tab.keyboard.press("u")
    page.drawn(count + 4)
    assert tab.input_value("#shown") == "1f1b"

    # Keys zoom, choose and change the schedule; micro-batches change places.
    before = tab.locator("#big").screenshot()
    tab.keyboard.press("+")
    assert tab.locator("#big").screenshot() != before
    tab.keyboard.press("0")
    tab.keyboard.press("ArrowRight")
    page.says("F(0,0): forward of micro-batch 0, partition 0; 0 to 1; device 0 then holds 1")
    tab.keyboard.press("]")
    assert tab.input_value("#shown") == "zb_h1"
    tab.fill("#exchange [name=one]", "2")
    tab.fill("#exchange [name=other]", "5")
    tab.click("#swap")
    page.says("Exchanged 2 and 5. The step takes as long as before")

    # The link holds settings and schedule.
    count = page.rounds
    tab.fill("[name=weights]", "1 1 2 1")
    page.drawn(count + 1)
    other = tab.context.new_page()
    other.goto(tab.url)
    other.wait_for_function("document.body.dataset.drawn")
    assert (other.inner_text("#facts"), other.input_value("#shown")) == (tab.inner_text("#facts"), "yours")
    other.close()

    # CSV out and in.
    tab.click("#text summary")
    tab.wait_for_function("document.querySelector('#csv').value")
    with tab.expect_download() as got:
        tab.click("#save")
    saved = check(read_csv(got.value.path().read_text())).schedule
    assert [action.i for action in saved.devices[3] if action.kind == "F"] == [0, 1, 5, 3, 4, 2, 6, 7]
    (tmp_path / "own.csv").write_text(to_csv(named_schedule("zb_v", 6, 6, 3)))
    count = page.rounds
    tab.set_input_files("#file", str(tmp_path / "own.csv"))
    page.drawn(count + 1)
    assert [tab.input_value(f"[name={name}]") for name in ("p", "m", "weights")] == ["3", "6", "1"]
    tab.fill("#csv", "0F0,0B0\n1B0,1F0\n")
    tab.click("#apply")
    page.says("Refused: F(0,1) must come before B(0,1)")

    # A wrong setting is refused in words, and nothing is drawn that is not so.
    count = page.rounds
    tab.fill("[name=forward]", "1 2")
    page.drawn(count + 1)
    page.says("forward must be one time of 0 or more, or one for each of 3 stages, got 1 2")
    assert page.faults == []
    tab.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_on_a_telephone(browser, port, scheme):
    page = Page(browser, f"http://127.0.0.1:{port}/#p=8&m=16&show=zb_v", scheme)
    for width in (390, 1280):
        page.tab.set_viewport_size({"width": width, "height": 900})
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(246, 247, 249)", "dark": "rgb(14, 18, 23)"}[scheme]
    assert page.faults == []
    page.tab.context.close()


def test_the_benchmark_reads_the_times_of_the_page(browser, port):
    found = redrawn(browser, f"http://127.0.0.1:{port}/", 2)
    assert {name: len(times) for name, times in found.items()} == {"shown schedule": 2, "all schedules": 2}
    first, everything = found.values()
    assert all(one <= two for one, two in zip(first, everything, strict=True))
    assert [*table("engine", {"all": [3.0, 1.0, 2.0]})] == ["| engine | all | 2 | 1 to 3 |"]


def test_a_static_page_is_drawn_without_python(browser, tmp_path):
    export(tmp_path, None)
    with served(ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))) as own:
        page = Page(browser, own)
        assert page.tab.inner_text("#facts").startswith("33 time")
        assert "Python did not start" in page.says("Python did not start")
        faults = list(page.faults)
        for control in ("[name=p]", "#text summary", "#swap", "#big"):
            box = page.tab.locator(control).bounding_box()
            page.tab.mouse.click(box["x"] + box["width"] / 4, box["y"] + box["height"] / 4)
            page.tab.keyboard.press("ArrowUp")
        assert (page.tab.input_value("[name=p]"), page.tab.locator("#csv").is_visible()) == ("4", False)
        assert page.tab.inner_text("#reason").startswith("Python did not start")
        page.tab.click(".one[data-name=gpipe]")
        assert page.tab.input_value("#shown") == "gpipe"
        assert page.faults == faults
        page.tab.context.close()
