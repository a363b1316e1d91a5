"""The page in a real browser: it opens without complaint and without a network, and its controls work."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("browser")


def state(tab):
    """What the timeline says it shows."""
    found = tab.evaluate("({...document.getElementById('timeline').dataset})")
    return {**found, "from": float(found["from"]), "to": float(found["to"]), "drawn": int(found["drawn"])}


def wait_until(tab, expression):
    """Wait until an expression holds in a frame of the page, whose policy lets nothing be evaluated later on."""
    look = f"const look = () => ({expression}) ? done() : requestAnimationFrame(look); look();"
    tab.evaluate(f"new Promise((done) => {{ {look} }})")


def turn_wheel(tab, times=1):
    """Turn the wheel forward above the canvas, and wait until the page has heard of it each time."""
    for _ in range(times):
        tab.evaluate(
            """void (window.turned = new Promise((done) => {
              const canvas = document.getElementById("timeline-canvas");
              canvas.addEventListener("wheel", () => done(true), { once: true });
            }))"""
        )
        tab.mouse.wheel(0, -100)
        assert tab.evaluate("window.turned")


def point(tab, kind, microbatch, partition):
    """Move the mouse onto the middle of a task of the first run; zooming and lanes are left as they are."""
    spot = tab.evaluate(
        """([kind, i, j]) => {
          const data = JSON.parse(document.getElementById("timeline-data").textContent);
          const root = document.getElementById("timeline").dataset;
          const run = data.sets.find((set) => set.name === root.set).runs.find((run) => run.name === root.variant);
          const at = (event, name) => event[data.fields.indexOf(name)];
          const event = run.events.find((event) => data.kinds[at(event, "kind")].name === kind
            && at(event, "microbatch") === i && at(event, "partition") === j);
          return { middle: (at(event, "start_us") + at(event, "end_us")) / 2, lane: at(event, "lane") };
        }""",
        [kind, microbatch, partition],
    )
    box, shown = tab.locator("#timeline-canvas").bounding_box(), state(tab)
    share = (spot["middle"] - shown["from"]) / (shown["to"] - shown["from"])
    # The geometry of timeline.js, for lanes that have no copy lane between them.
    tab.mouse.move(box["x"] + 128 + share * (box["width"] - 140), box["y"] + 22 + 33 * spot["lane"] + 13)


def test_it_opens_without_complaint_or_request(tab):
    tab.wait_for_selector("#timeline[data-drawn]")
    assert tab.faults == []
    assert "what each part of a pipeline brings" in tab.title() + tab.locator("h1").inner_text()
    assert (
        tab.evaluate("performance.getEntriesByType('resource').filter((e) => !e.name.startsWith('data:')).length") == 0
    )


def test_every_picture_is_drawn(tab):
    widths = tab.evaluate("Promise.all([...document.images].map((i) => i.decode().then(() => i.naturalWidth)))")
    assert len(widths) == 4
    assert all(width > 0 for width in widths)


def test_the_canvas_is_painted(tab):
    colours = """() => {
      const canvas = document.getElementById("timeline-canvas");
      const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      const found = new Set();
      for (let k = 0; k < pixels.length; k += 4) if (pixels[k + 3] === 255) found.add(pixels.slice(k, k + 3).join());
      return [...found];
    }"""
    found = set(tab.evaluate(colours))
    # Forward, recompute and backward in the colours of the figures.
    assert {"86,180,233", "240,228,66", "230,159,0"} <= found


def test_it_begins_with_the_whole_step_of_two_runs(tab):
    shown = state(tab)
    assert (shown["set"], shown["variant"], shown["other"]) == ("ablation, simulated", "baseline", "dep-str-ptl")
    assert shown["from"] == 0
    assert shown["drawn"] == 92 + 92 + 24 * 2 + 8 * 2


def test_buttons_and_keys_zoom_and_move(tab):
    whole = state(tab)
    tab.click("#timeline-in")
    near = state(tab)
    assert near["to"] - near["from"] == pytest.approx(whole["to"] / 2)
    assert near["drawn"] < whole["drawn"]
    tab.locator("#timeline").press("ArrowRight")
    assert state(tab)["from"] == pytest.approx(near["from"] + 0.2 * (near["to"] - near["from"]))
    tab.click("#timeline-out")
    tab.locator("#timeline").press("+")
    tab.locator("#timeline").press("0")
    assert state(tab) == whole


def test_the_wheel_zooms_about_the_pointer_with_ctrl_alone(tab):
    box, whole = tab.locator("#timeline-canvas").bounding_box(), state(tab)
    tab.mouse.move(box["x"] + 128, box["y"] + 30)
    turn_wheel(tab)
    assert state(tab) == whole
    box = tab.locator("#timeline-canvas").bounding_box()
    tab.mouse.move(box["x"] + 128, box["y"] + 30)
    tab.keyboard.down("Control")
    turn_wheel(tab)
    tab.keyboard.up("Control")
    near = state(tab)
    assert near["to"] - near["from"] == pytest.approx(whole["to"] / 1.25)
    assert near["from"] == pytest.approx(0, abs=1e-3 * whole["to"])


def test_dragging_moves_along(tab):
    for _ in range(3):
        tab.click("#timeline-in")
    box, before = tab.locator("#timeline-canvas").bounding_box(), state(tab)
    tab.mouse.move(box["x"] + 600, box["y"] + 40)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 400, box["y"] + 40, steps=3)
    tab.mouse.up()
    after = state(tab)
    moved = 200 / (box["width"] - 140) * (before["to"] - before["from"])
    assert after["from"] - before["from"] == pytest.approx(moved, rel=1e-3)
    assert after["to"] - after["from"] == pytest.approx(before["to"] - before["from"])


def test_hovering_tells_of_a_task(tab):
    point(tab, "backward", 3, 2)
    words = tab.locator("#timeline-tip").inner_text().splitlines()
    assert words[0] == "backward of micro-batch 3, partition 2"
    assert words[1] == "cuda:2, compute stream"
    assert words[2].endswith("for 3.4 ms")
    assert words[4] == "4 KiB"
    tab.mouse.move(2, 2)
    assert tab.locator("#timeline-tip").is_hidden()


def test_hovering_follows_the_zoom(tab):
    whole = state(tab)
    point(tab, "forward", 0, 0)
    tab.keyboard.down("Control")
    turn_wheel(tab, 8)
    tab.keyboard.up("Control")
    near = state(tab)
    assert near["to"] - near["from"] == pytest.approx(whole["to"] / 1.25**8)
    point(tab, "forward", 0, 0)
    assert tab.locator("#timeline-tip").inner_text().startswith("forward of micro-batch 0, partition 0")


def test_variants_and_evidence_are_switched(tab):
    tab.select_option("#timeline-other", "")
    assert (state(tab)["other"], state(tab)["drawn"]) == ("", 92)
    tab.select_option("#timeline-variant", "dep-str-ptl")
    shown = state(tab)
    assert shown["variant"] == "dep-str-ptl"
    assert tab.locator("#timeline-badge").inner_text() == "simulated"
    tab.select_option("#timeline-set", label="ablation, measured")
    assert (state(tab)["set"], state(tab)["variant"]) == ("ablation, measured", "dep-x-x")
    assert tab.locator("#timeline-badge").inner_text() == "measured"
    assert "testnet" in tab.locator("#timeline-words").inner_text()


def test_kinds_are_hidden_and_shown(tab):
    whole, button = state(tab)["drawn"], tab.locator("#timeline-kinds button").nth(1)
    button.click()
    assert state(tab)["drawn"] == whole - 2 * 28
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert state(tab)["drawn"] == whole


def test_tables_are_sorted_and_searched(tab):
    table = tab.locator("#table-ablation-3")
    heads = table.locator("th").all_inner_texts()
    column = heads.index("samples/s")
    table.locator("th button").nth(column).click()
    table.locator("th button").nth(column).click()
    shown = table.locator("tbody tr").all()
    first, last = (shown[place].locator("td").nth(column) for place in (0, -1))
    values = [float(row.locator("td").nth(column).get_attribute("data-value") or "nan") for row in shown[:5]]
    assert values == sorted(values, reverse=True)
    assert first.inner_text()
    assert last.inner_text() == ""
    tab.fill('input[data-filters="table-ablation-3"]', "dep-x unsupported")
    assert table.locator("tbody tr:visible").count() == 0
    tab.fill('input[data-filters="table-ablation-3"]', "dep-str unsupported")
    assert table.locator("tbody tr:visible").count() == 8
    assert tab.locator('[data-counts="table-ablation-3"]').inner_text() == "8 of 32 lines"


def test_what_names_a_line_stays_in_view(tab):
    tab.set_viewport_size({"width": 500, "height": 800})
    table = tab.locator("#table-ablation-3")
    tab.wait_for_selector("#table-ablation-3 td.stuck")
    places = """(table) => {
      const left = (element) => Math.round(element.getBoundingClientRect().x);
      return [...table.rows[1].cells].slice(0, 2).map((cell) => left(cell) - left(table.closest(".scroll")));
    }"""
    first, second = table.evaluate(places)
    table.evaluate("(table) => { table.closest('.scroll').scrollLeft = 30 }")
    assert table.evaluate(places) == [first, second - 30]
    assert first == 0


def test_columns_stick_only_where_the_table_is_wider_than_the_window(tab):
    tab.set_viewport_size({"width": 3000, "height": 800})
    wait_until(tab, "!document.querySelector('#table-ablation-3 .stuck')")


def test_the_status_of_a_line_stays_in_view(tab):
    tab.set_viewport_size({"width": 420, "height": 800})
    table = tab.locator("#table-ablation-3")
    hidden = """(table) => {
      const box = table.closest(".scroll").getBoundingClientRect();
      const ends = [...table.querySelectorAll(".outcome")].map((cell) => cell.getBoundingClientRect().right);
      return [table.offsetWidth > box.width, ends.length, ends.filter((end) => Math.abs(end - box.right) > 20).length];
    }"""
    assert table.evaluate(hidden) == [True, 33, 0]


def test_a_reason_is_told_on_its_line(tab):
    status = tab.locator("#table-ablation-3 td[title]").first
    assert status.get_attribute("title") == "RuntimeError: worker of partition 2 died"


def test_a_narrow_window_needs_no_sideways_scrolling(tab):
    tab.set_viewport_size({"width": 420, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 420
    assert state(tab)["drawn"] > 0


def test_the_findings_come_first(tab):
    sections = tab.evaluate("[...document.querySelectorAll('section')].map((section) => section.id)")
    assert sections[:3] == ["findings", "provenance", "timelines"]
    card = tab.locator("#findings .findings > li").first
    assert card.locator(".badge").all_inner_texts()
    assert card.locator(".lead").inner_text()


def test_a_figure_is_enlarged_zoomed_and_closed_again(tab):
    tab.locator("#figure-ablation .enlarge").click()
    viewer, picture = tab.locator("#viewer"), tab.locator("#viewer-view img")
    tab.wait_for_selector('#viewer[data-scale="1"]')
    assert tab.locator("#viewer-title").inner_text() == "ablation"
    whole = picture.bounding_box()["width"]
    tab.click("#viewer-in")
    assert picture.bounding_box()["width"] == pytest.approx(1.5 * whole, abs=1)
    viewer.press("+")
    assert picture.bounding_box()["width"] == pytest.approx(2.25 * whole, abs=1)
    viewer.press("0")
    assert picture.bounding_box()["width"] == pytest.approx(whole, abs=1)
    viewer.press("Escape")
    assert viewer.is_hidden()


def test_a_figure_is_enlarged_by_the_keyboard(tab):
    tab.locator("#figure-ablation .enlarge").focus()
    tab.keyboard.press("Enter")
    assert tab.locator("#viewer").is_visible()


def test_figures_take_the_width_of_the_page(tab):
    spots = tab.evaluate(
        "[...document.querySelectorAll('#section-ablation figure')].map((f) => f.getBoundingClientRect())"
    )
    assert len({round(spot["top"]) for spot in spots}) == 1
    assert sum(spot["width"] for spot in spots) > 0.9 * tab.evaluate("document.querySelector('main').clientWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(tab, scheme):
    """Contrast of 4.5 and more for text, and of 3 and more for the badges, whose colours are those of the figures."""
    tab.emulate_media(color_scheme=scheme)
    luminance = """(selector) => {
      const seen = (value) => {
        const part = value.match(/[0-9.]+/g).slice(0, 3).map((c) => c / 255)
          .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
      };
      const [ink, paper] = [document.querySelector(selector), document.body]
        .map((element, index) => seen(getComputedStyle(element)[index ? "backgroundColor" : "color"]));
      return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    }"""
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(23, 23, 23)"
    assert dark == (scheme == "dark")
    contrast = {name: tab.evaluate(luminance, name) for name in ("p", "nav a", ".where", "td", ".badge.published")}
    assert {name: value for name, value in contrast.items() if value < 4.5} == {}
    badges = {name: tab.evaluate(luminance, f".badge.{name}") for name in ("measured", "simulated")}
    assert {name: value for name, value in badges.items() if value < 3} == {}


def test_the_timeline_is_drawn_in_the_colours_of_the_scheme(tab):
    tab.emulate_media(color_scheme="dark")
    idle = """() => {
      const canvas = document.getElementById("timeline-canvas");
      const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      let count = 0;
      for (let k = 0; k < pixels.length; k += 4) count += pixels[k] === 44 && pixels[k + 1] === 44;
      return count;
    }"""
    wait_until(tab, f"({idle})() > 0")
