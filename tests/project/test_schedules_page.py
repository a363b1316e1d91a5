"""What docs/schedules.md shows is what the code gives: its pictures, and the numbers of its table."""

from __future__ import annotations

import re

import pytest

from gpipe_bench.schedules import SCHEDULES, check, drawn, named_schedule
from scripts.draw_schedules import CYCLES, PICTURE, drawn_cycles, drawn_schedules
from tests.project.pages import PAGES, blocks

PAGE = PAGES["docs/schedules.md"]
ROWS = re.findall(r"^\| `.*http.*$", PAGE, re.MULTILINE)
LINES = [[field.strip() for field in row.split("|")[1:-1]] for row in ROWS]


def test_the_picture_is_drawn_by_the_code():
    (picture,) = blocks(PAGE, "text")
    assert picture == drawn(named_schedule("zb_h1", m=4, n=3, devices=3)) + "\n"


def test_the_timelines_are_drawn_by_the_code():
    assert PICTURE.read_text(encoding="utf-8") == drawn_schedules(), "run: python -m scripts.draw_schedules"
    assert CYCLES.read_text(encoding="utf-8") == drawn_cycles(), "run: python -m scripts.draw_schedules"


def test_naive_model_parallelism_stands_above_the_clock_cycles():
    # By hand: three partitions take 5 forward and 10 backward one after the other; cut in five, 7 cycles of 1 and of 2.
    text = drawn_cycles()
    assert f"{45 / 21:.2f} times as fast" in text
    assert re.findall(r"bubble (\d+) %", text) == ["67", "29"]
    assert "computed" in text.lower()


def test_the_timelines_have_a_panel_for_every_schedule():
    texts = re.findall(r'class="name left"[^>]*>([^<]*)<', drawn_schedules())
    assert set(texts[1:]) == set(SCHEDULES)


def test_every_schedule_has_a_line():
    assert {name.strip("`") for name, *_ in LINES} == set(SCHEDULES)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_numbers_are_those_of_the_schedule(line):
    name, _, per_device, bubble, rule = line
    p, m = 4, 8
    facts = check(named_schedule(name.strip("`"), m, p * int(per_device[0]), p))
    assert bubble == f"{facts.bubble():.1%}".replace("%", " %")
    formula = re.sub(r"(\d) (?=[pm⌊])", r"\1 * ", rule.removesuffix(" halves"))
    formula = formula.replace("⌊", "(").replace("⌋", ")").replace("/", "//")
    assert eval(formula, {"p": p, "m": m}) == max(facts.in_flight)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_halves_are_said_where_devices_have_two_partitions(line):
    _, _, per_device, _, rule = line
    assert rule.endswith("halves") == per_device.startswith("2")
