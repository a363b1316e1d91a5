"""How much of the project one training step runs through: a reader has to know that much."""

from __future__ import annotations

import pytest

from scripts.count_step import EXECUTORS, counted, step_of

# Files and functions. The plan for this engine was 14 and 95 for the paper's executor, 10 and 80 for the runtime.
MOST = {"paper": (17, 129), "runtime": (19, 124)}


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_step_of_two_linear_layers_does_not_grow(name):
    files, functions = counted(step_of(EXECUTORS[name]))
    assert len(files) <= MOST[name][0], sorted(files)
    assert len(functions) <= MOST[name][1], sorted(functions)


def test_functions_of_both_executors_are_seen_in_whatever_thread():
    _, functions = counted(step_of(None))
    assert ("engine/paper/checkpoint.py", "Checkpoint.forward") in functions
    _, functions = counted(step_of("gpipe"))
    assert ("engine/runtime/cell.py", "Cell.backward") in functions
