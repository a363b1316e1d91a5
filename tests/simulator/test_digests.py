"""A sample of the stored digests; ``python -m tests.simulator.digests compare`` compares all."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import version

import pytest

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.simulator.clock.run import Settings, run
from gpipe_bench.simulator.workloads.workload import MemoryOp
from tests.project.tree import ROOT
from tests.simulator.digests.commands import SAMPLES, lines_of
from tests.simulator.digests.digest import FIELDS, input_of, outcome_of
from tests.simulator.digests.groups import CASES, GROUPS
from tests.simulator.digests.model_cases import MODELLED
from tests.simulator.digests.pieces import MIB, Wires, stage, with_sizes
from tests.simulator.digests.stored import differences, is_stored, read

SAMPLE = 7
"""Cases of each group."""

SLOW = {"large": 3, "steps": 4}

PINNED = re.search(r"^torch==(.*)$", (ROOT / "requirements" / "pins.in").read_text(), re.MULTILINE)
TRACED = pytest.mark.skipif(
    PINNED is None or version("torch").partition("+")[0] != PINNED[1], reason="another PyTorch gives other traces"
)


def test_every_group_is_stored():
    assert [group for group in GROUPS if not is_stored(group)] == []


@pytest.mark.parametrize("group", [pytest.param(name, marks=TRACED if name in MODELLED else ()) for name in CASES])
def test_cases_are_as_they_were_stored(group):
    cases, stored = list(CASES[group]()), read(group)
    assert [case.name for case in cases] == list(stored)
    count = SLOW.get(group, SAMPLE)
    # Not at equal distances: neighbours have the same settings but one.
    chosen = [cases[(place * len(cases) // count + 13 * place) % len(cases)] for place in range(count)]
    assert differences(stored, [case.line() for case in chosen]) == []


@TRACED
@pytest.mark.parametrize("group", SAMPLES)
def test_runs_behind_tables_are_as_they_were_stored(group):
    lines = lines_of(SAMPLES[group])
    assert lines
    assert differences(read(group), lines) == []


STAGES = [stage()] * 2
WORK, MACHINE = with_sizes(3, STAGES), Wires()


@pytest.mark.parametrize(
    ("work", "machine", "fields"),
    [
        (WORK, Wires(latency_ns=9000), {"times"}),
        (with_sizes(3, [stage(graph=31 * MIB)] * 2), MACHINE, {"live", "allocated", "reserved"}),
        (with_sizes(3, [stage(), stage(size=2 * MIB + 1)]), MACHINE, {"order", "live", "allocated"}),
    ],
    ids=["slower links", "larger graphs", "larger outputs"],
)
def test_a_digest_tells_what_differs(work, machine, fields):
    chosen = Settings(checkpoint="never")
    one, other = (outcome_of(run(*both, chosen)) for both in ((WORK, MACHINE), (work, machine)))
    assert {name for name in FIELDS if one[name] != other[name]} >= fields
    assert input_of(WORK, MACHINE, chosen) != input_of(work, machine, chosen)


def test_names_of_scratch_memory_do_not_matter_but_which_are_the_same_does():
    def named(*names):
        tasks = [
            replace(one, graph_memory=(MemoryOp("scratch", name, MIB),))
            for one, name in zip(STAGES, names, strict=True)
        ]
        return input_of(with_sizes(3, tasks), MACHINE, Settings())

    assert named(3, 8) == named(5, 4) != named(5, 5) == named(1, 1)


def test_a_full_device_is_told():
    with pytest.raises(OutOfMemory) as caught:
        run(WORK, replace(MACHINE, capacity_bytes=40 * MIB), Settings())
    found = outcome_of(caught.value)
    assert found["full"].startswith("device 0 needs ")
    assert {found[name] for name in FIELDS if name != "full"} == {""}


def test_what_differs_is_said_by_case():
    line = {"case": "a", "input": "1", **dict.fromkeys(FIELDS, "x")}
    stored = {"a": line, "b": {**line, "case": "b"}}
    lines = [
        {**line, "times": "y", "live": "y"},
        {**line, "case": "b", "input": "2", "times": "y"},
        {**line, "case": "c"},
    ]
    assert differences(stored, lines) == [("a", ("times", "live")), ("b", ("input",)), ("c", ("not stored",))]
