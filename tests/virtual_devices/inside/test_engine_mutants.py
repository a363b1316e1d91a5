"""Every wait and every record_stream of the engine is needed: without it the race checker reports something."""

from __future__ import annotations

import pytest

from gpipe_bench import Components
from tests.virtual_devices.bed.mutants import mutants
from tests.virtual_devices.inside.pipelines import Case, batch, step

# What a mutant may break: transfers between devices and within one, skips both ways, with and without copy streams.
CASES = [
    Case(devices, 3, components, checkpoint, "nested", transfer)
    for devices in ((0, 1, 2), (0, 0, 0))
    for components in (Components(), Components(portals=False), Components(copy_streams=False))
    for checkpoint in ("always", "never")
    for transfer in ("direct", "host")
]
MUTANTS = mutants()


def reports():
    """How many races all cases have together."""
    count = 0
    for case in CASES:
        pipe = case.pipe()
        count += len(step(pipe, batch(case.rows, pipe.devices[0])).races)
    return count


def test_the_engine_itself_has_no_race():
    assert reports() == 0


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_reported(mutant):
    with mutant.applied():
        assert reports() > 0


def test_a_mutant_ends_with_its_block():
    with MUTANTS[0].applied():
        pass
    assert reports() == 0


def test_mutants_are_all_waits_and_records_of_the_engine():
    functions = {f"{mutant.module.rpartition('.')[2]}.{mutant.function}" for mutant in MUTANTS}
    assert functions >= {
        "streams.wait_stream",
        "streams.record_stream",
        "transfer.Wait.forward",
        "transfer._move_one",
        "transfer._barrier",
        "transfer._through_host",
        "gpipe.GPipe._hand_over",
    }
