"""What the page asks, without a page: answers are those of the package, and what it refuses is said in its words."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_bench.playground.page import static_files
from gpipe_bench.playground.questions import ask
from gpipe_bench.schedules import Durations, check, named_schedule, read_csv, searched, timing, to_csv
from tests.playground.pyodide import NO_PYODIDE, pyodide_folder

NODE = """
import { readFileSync } from "node:fs";
const [zip, folder] = process.argv.slice(2);
const { loadPyodide } = await import(`file://${folder}/pyodide.mjs`);
const python = await loadPyodide({ indexURL: `${folder}/` });
python.unpackArchive(new Uint8Array(readFileSync(zip)), "zip", { extractDir: "/package" });
python.runPython("import sys; sys.path.insert(0, '/package')");
const { ask } = python.pyimport("gpipe_bench.playground.questions");
const lines = readFileSync(0, "utf8").trim().split("\\n").map((line) => ask(line));
console.log(lines.join("\\n"));
"""


def asked(kind, **given):
    return json.loads(ask(json.dumps({"ask": kind, **given})))


def refused(kind, **given):
    return asked(kind, **given)["problems"]


NAMES = asked("names")["names"]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v", "interleaved"])
def test_a_step_is_that_of_the_schedule(name):
    p, m, n = 4, 8, 4 if name in {"1f1b", "zb_h1"} else 8
    found = asked("step", source=name, settings={"p": p, "m": m, "forward": [2], "transfer": 0.5})
    schedule = named_schedule(name, m, n, p)
    # T is that of 1 / p of the model, whatever the schedule cuts.
    times = timing(schedule, Durations(2 * p / n, p / n, p / n), 0.5)
    assert (found["makespan"], found["bubble"]) == (times.makespan, round(times.bubble, 5))
    row = found["rows"][1]
    assert row["kinds"] == "".join(action.kind for action in schedule.devices[1])
    assert row["start"] == [times.start[action] for action in schedule.devices[1]]
    assert found["parts"] == [0] * 4 + [1] * (n - 4)


def test_each_stage_has_times_of_its_own():
    settings = {"p": 2, "m": 4, "forward": [1, 3], "inputs": [1, 1], "weights": [2]}
    found = asked("step", source="1f1b", settings=settings)
    times = timing(named_schedule("1f1b", 4, 2, 2), [Durations(1, 1, 2), Durations(3, 1, 2)])
    assert found["makespan"] == times.makespan
    # Both partitions of a stage take half of its time.
    halves = asked("step", source="looped_bfs", settings=settings)
    expected = timing(named_schedule("looped_bfs", 4, 4, 2), [Durations(k, 0.5, 1) for k in (0.5, 0.5, 1.5, 1.5)])
    assert halves["makespan"] == expected.makespan


def test_memory_is_in_activations_of_a_stage():
    settings = {"p": 4, "m": 8, "limit": 3.9, "kept": 1}
    for name, peak in (("gpipe", 8), ("1f1b", 4), ("zb_v", 4), ("v_min", 2)):
        found = asked("step", source=name, settings=settings)
        assert found["peak"] == peak, name
        assert found["fits"] == (peak <= 3.9)
    checkpointed = asked("step", source="gpipe", settings={**settings, "checkpoint": "always", "boundary": 0.25})
    assert checkpointed["peak"] == 8 * 0.25 + 0.75
    assert "R" in checkpointed["rows"][0]["kinds"]


def test_the_search_keeps_to_the_limit():
    found = asked("csv", source="searched", settings={"p": 4, "m": 8, "limit": 3, "transfer": 0.1})
    assert read_csv(found["csv"]) == searched(8, 4, 3, Durations(), 0.1, kept=0.5)


def test_the_summary_has_the_fastest_that_fits_and_those_that_none_beats():
    settings = {"p": 4, "m": 8, "limit": 4, "kept": 1}
    steps = {name: asked("step", source=name, settings=settings) for name in NAMES}
    found = asked("summary", sources=NAMES, settings=settings)
    fitting = [name for name in NAMES if steps[name]["peak"] <= 4]
    assert steps[found["best"]]["makespan"] == min(steps[name]["makespan"] for name in fitting)
    value = {name: (steps[name]["makespan"], steps[name]["peak"]) for name in NAMES}
    beaten = {
        a
        for a, one in value.items()
        if any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in value.values())
    }
    assert {value[name] for name in found["front"]} == {value[name] for name in {*NAMES} - beaten}
    assert steps[found["least"]]["peak"] == min(step["peak"] for step in steps.values())
    assert asked("summary", sources=NAMES, settings={**settings, "limit": 0.1})["best"] is None


def test_a_move_gives_the_schedule_as_csv_and_a_step_of_it():
    settings = {"p": 4, "m": 8}
    text = asked("move", source="1f1b", settings=settings, place=[0, 5], to=[0, 4])["csv"]
    assert text.startswith("0F0,0F1,0F2,0F3,0F4,0B0,")
    assert asked("step", source=text, settings=settings)["peak"] == 5
    assert asked("reach", source="1f1b", settings=settings, place=[0, 5]) == {"first": 4, "last": 6}
    assert asked("csv", source=text, settings=settings) == {"csv": text}


def test_micro_batches_change_places_on_all_devices():
    text = asked("exchange", source="gpipe", one=0, other=7, passes="backward", settings={"p": 2, "m": 8})["csv"]
    assert [row.split(",")[8] for row in text.split()] == ["0B0", "1B0"]
    assert check(read_csv(text)).microbatches == 8


def test_what_an_action_waits_for():
    found = asked("why", source="1f1b", action=["B", 0, 1], settings={"checkpoint": "always"})
    assert found["before"] == [["F", 0, 1], ["B", 0, 2]]
    assert found["after"] == [["B", 0, 0]]


def test_a_schedule_that_was_written_is_read_with_its_numbers():
    text = to_csv(named_schedule("zb_v", 6, 6, 3))
    assert asked("read", text=text) == {"csv": text, "p": 3, "m": 6}


def test_an_illegal_move_is_refused_with_the_words_of_the_checker():
    (problem,) = refused("move", source="1f1b", place=[0, 5], to=[0, 0])
    assert problem.startswith("a device must receive in the order in which another one sends, got F(4,0) next")
    (problem,) = refused("move", source="1f1b", place=[0, 5], to=[2, 3])
    assert "a partition must be on one device" in problem
    assert "F(0,0) must come before B(0,0)" in refused("exchange", source="1f1b", one=0, other=7, passes="forward")[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"p": 0}, "p must be a whole number of at least 1, got 0"),
        ({"m": 2.5}, "m must be a whole number of at least 1, got 2.5"),
        ({"m": True}, "m must be a whole number of at least 1, got True"),
        ({"p": 64, "m": 640}, "p and m must be small enough to draw, got 64 and 640"),
        ({"forward": [1, 2]}, "forward must be one time of 0 or more, or one for each of 4 stages, got 1 2"),
        ({"inputs": [None]}, "inputs must be one time"),
        ({"weights": 1}, "weights must be one time of 0 or more, or one for each of 4 stages, got 1"),
        ({"transfer": -1}, "transfer must be a number of 0 or more, got -1"),
        ({"limit": "4"}, "limit must be a number of 0 or more, got '4'"),
        ({"kept": 1.5}, "kept must be a share from 0 to 1, got 1.5"),
        ({"checkpoint": "x"}, "checkpoint must be one of always, except_last, never, got 'x'"),
        ({"speed": 1}, "a setting must be one of p, m, forward"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, words):
    assert words in refused("step", source="1f1b", settings=settings)[0]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nope", "a field must be a stage, one of F, B, I, W, and a micro-batch, such as 0F3, got 'nope'"),
        ("", "a schedule must have an action, got none"),
        ("0F0,0B0\n1B0,1F0\n", "F(0,1) must come before B(0,1)"),
        ("0F0,0B0\n1F0,1B0\n", "your schedule must be for 4 devices and 8 micro-batches, got 2 devices and 1"),
        ("0F0,0F999999999", "the backward pass of micro-batch 0 on partition 0 must be B, or I and W, got none"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(source, words):
    assert words in refused("step", source=source)[0]


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"ask":"nope"}', '{"ask":"move","source":"1f1b","place":1}'])
def test_what_is_no_question_gets_an_answer(text):
    assert "reload the page" in json.loads(ask(text))["problems"][0]


def questions():
    for settings in (
        {},
        {"p": 3, "m": 7, "transfer": 0.3, "weights": [1, 0.7, 1.3], "checkpoint": "except_last", "limit": 3},
    ):
        for source in NAMES:
            yield {"ask": "step", "source": source, "settings": settings}
            yield {"ask": "csv", "source": source, "settings": settings}
            yield {"ask": "move", "source": source, "settings": settings, "place": [0, 2], "to": [0, 0]}
        yield {"ask": "reach", "source": "zb_v", "settings": settings, "place": [1, 3]}
        yield {"ask": "summary", "sources": NAMES, "settings": settings}


def test_python_in_the_page_gives_the_same_answers(tmp_path):
    """Pyodide in Node: no browser, and another version of Python."""
    node, folder = shutil.which("node"), pyodide_folder()
    if node is None or folder is None:
        pytest.skip(f"needs node; {NO_PYODIDE}")
    (tmp_path / "ask.mjs").write_text(NODE)
    (tmp_path / "modules.zip").write_bytes(static_files()["gpipe_bench.zip"])
    lines = [json.dumps(question) for question in questions()]
    command = [node, str(tmp_path / "ask.mjs"), str(tmp_path / "modules.zip"), str(folder)]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)
    answers = done.stdout.splitlines()
    assert len(answers) == len(lines)
    assert [line for line, answer in zip(lines, answers, strict=True) if ask(line) != answer] == []


def test_the_modules_of_the_page_suffice(tmp_path):
    (tmp_path / "modules.zip").write_bytes(static_files()["gpipe_bench.zip"])
    start = "import sys; sys.path.insert(0, sys.argv[1])"
    program = f"{start}; from gpipe_bench.playground.questions import ask; print(ask(sys.argv[2]))"
    question = '{"ask":"step","source":"zb_v"}'
    command = [sys.executable, "-I", "-S", "-c", program, str(tmp_path / "modules.zip"), question]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.stdout.strip() == ask(question), done.stderr


def test_scripts_know_no_rule_of_schedules():
    """They name none but the one that is shown first, and colours stand in Python."""
    parts = Path(static_files.__globals__["__file__"]).with_name("parts")
    text = "".join(path.read_text() for path in sorted(parts.glob("*.*js")))
    assert {name for name in NAMES if re.search(rf'"{name}"', text)} == {"1f1b"}
    assert "#E0702B" not in text
