"""What the simulator's mechanisms are worth is still what the committed table says."""

from __future__ import annotations

import csv

import pytest

from gpipe_bench.machine.profile import load_profile
from studies.simulator.effects import MECHANISMS, NOTHING, TABLE, effects, table
from tests.cover import EVERY_CASE

QUICK = ("other value: links of 9 GB/s", "limit of the launch queue", "scratch memory of convolutions")


@pytest.mark.timeout(600)  # with all mechanisms a minute
def test_the_committed_effects_are_those_of_the_simulator():
    chosen = [one for one in MECHANISMS if EVERY_CASE or one.name in QUICK]
    made = table(effects(chosen, load_profile("p40"))).splitlines()
    committed = TABLE.read_text(encoding="utf-8").splitlines()
    assert len(made) == len(chosen) + 2
    assert set(made) <= set(committed)


def test_the_table_has_a_line_for_each_mechanism():
    with TABLE.open(newline="", encoding="utf-8") as file:
        names = [row["left_out"] for row in csv.DictReader(file)]
    assert names == [NOTHING, *(one.name for one in MECHANISMS)]
