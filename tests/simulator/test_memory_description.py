"""What Python tells the memory in C: codes, rows and the description."""

from __future__ import annotations

import ctypes
import re
from array import array
from dataclasses import replace

import pytest

from gpipe_bench.simulator.memory.description import describe
from gpipe_bench.simulator.memory.lowering import CODE_BITS, CODES, LoweredTask
from gpipe_bench.simulator.workloads.workload import (
    Kernels,
    MemoryOp,
    SplitWork,
    StaticMemory,
    gradient_name,
    input_name,
)
from tests.simulator.native_memory import FOLDER, NativeMemory, ScriptedClock, library
from tests.simulator.oracle.places import Places
from tests.simulator.support import task, workload


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    return library()


def constants(name):
    return dict(re.findall(r"\b([A-Z_]+) = (-?\d+)", (FOLDER / name).read_text()))


def rows(numbers):
    """Code, slot and bytes of each row."""
    codes = dict(enumerate(CODES))
    mask = (1 << CODE_BITS) - 1
    return [(codes[row & mask], row >> CODE_BITS, size) for row, size in zip(numbers[::2], numbers[1::2], strict=True)]


def test_codes_are_those_of_the_rows_in_c():
    found = constants("state.h")
    assert {f"ROW_{name.upper()}": str(code) for code, name in enumerate(CODES)} == {
        name: code for name, code in found.items() if name.startswith("ROW_")
    }
    assert f"#define CODE_BITS {CODE_BITS}\n" in (FOLDER / "state.h").read_text()


def test_a_pass_without_graph_gives_back_what_does_not_leave():
    ops = (MemoryOp("alloc", 3, 10), MemoryOp("alloc", 4, 20), MemoryOp("free", 3), MemoryOp("alloc", 5, 30))
    lowered = LoweredTask(task(forward_memory=ops, graph_memory=ops, leaving=(5,)), {})
    assert rows(lowered.lists[6]) == [
        ("alloc", 2, 10),
        ("alloc", 1, 20),
        ("drop", 2, 0),
        ("alloc", 0, 30),
        ("drop", 1, 0),
    ]
    assert rows(lowered.lists[7]) == [("alloc", 2, 10), ("alloc", 1, 20), ("drop", 2, 0), ("alloc", 0, 30)]
    assert lowered.left == 2


def test_what_is_freed_at_once_is_one_row():
    ops = (MemoryOp("alloc", 3, 10), MemoryOp("free", 3), MemoryOp("scratch", 77, 5))
    assert rows(LoweredTask(task(forward_memory=ops), {77: 4}).lists[6]) == [("brief", 0, 10), ("scratch", 4, 5)]


def test_rows_of_a_backward_pass():
    graph = (MemoryOp("alloc", 0, 10), MemoryOp("alloc", 1, 20))
    ops = (
        MemoryOp("alloc", 7, 5),
        MemoryOp("free", input_name(0)),
        MemoryOp("free", gradient_name(0)),
        MemoryOp("free", 0),
        MemoryOp("view", 7),
    )
    lowered = LoweredTask(task(graph_memory=graph, backward_memory=ops, leaving=(0,)), {})
    assert rows(lowered.lists[12]) == [
        ("alloc", 2, 5),
        ("let_go", 0, 0),
        ("let_go", 1, 0),
        ("leaving", 0, 0),
        ("view", 2, 5),
        ("kept", 0, 0),
        ("drop", 1, 0),
    ]
    assert lowered.lists[4] == [True]
    assert lowered.lists[5] == [0]


def described(work):
    return describe(work, Places(range(work.n), copy_streams=False, transfer="direct"), capacity=0, riding=False)


def test_a_description_that_is_cut_off_is_refused(native):
    whole = described(workload(2, [task(), task()], [(0, 1)], static=(StaticMemory((1, 2), 3, (4,), 5),) * 2))
    for length in range(len(whole)):
        part = array("q", whole[:length])
        assert native.memory_new(ctypes.c_void_p(part.buffer_info()[0]), length) is None


def split_task():
    """Its graph keeps block 0 until I is over, and block 1, what returns, and the gradient that came until W is."""
    return task(
        input_bytes=(7,),
        output_bytes=(100,),
        graph_memory=(MemoryOp("alloc", 0, 10), MemoryOp("alloc", 1, 20)),
        backward_memory=(MemoryOp("free", 0), MemoryOp("alloc", 2, 5), MemoryOp("free", 1), MemoryOp("gradient", 2)),
        split=SplitWork(
            Kernels(1),
            Kernels(1),
            inputs_memory=(MemoryOp("free", 0), MemoryOp("alloc", 3, 7), MemoryOp("alloc", 4, 3)),
            weights_memory=(
                MemoryOp("alloc", 2, 5),
                MemoryOp("free", gradient_name(0)),
                MemoryOp("free", 1),
                MemoryOp("free", 3),
                MemoryOp("gradient", 2),
            ),
            returning=(3,),
        ),
    )


def test_the_two_halves_of_a_backward_pass(native):
    work = workload(1, [split_task()], static=(StaticMemory(gradients=5),))
    places = Places((0,), copy_streams=False, transfer="direct")
    memory = NativeMemory(native, work, places, ScriptedClock(), capacity=0, riding=False)

    def live(*call):
        memory.call(*call)
        return memory.uses()[0][0]

    batch = 7
    assert live("start") == batch
    assert live("forward", 0, 0, 0) == batch + 30 + 100
    memory.call("collected", 0, 0)
    assert live("microbatch_loss", 0) == batch + 30 + 100
    assert live("backward", 0, 0, 1) == batch + 20 + 7 + 3 + 100
    assert live("backward", 0, 0, 2) == batch + 5
    assert live("update") == batch + 5
    assert live("next_step") == batch


def test_what_returns_from_the_first_half_lives_until_both_have_let_go_of_it(native):
    work = workload(1, [split_task()] * 2, static=(StaticMemory(gradients=5),) * 2)
    places = Places((0, 0), copy_streams=False, transfer="direct")
    memory = NativeMemory(native, work, places, ScriptedClock(), capacity=0, riding=False)
    for call in (("start",), *((name, 0, j) for j in (0, 1) for name in ("forward", "collected"))):
        memory.call(*call, *((0,) if call[0] == "forward" else ()))
    memory.call("microbatch_loss", 0)

    def live(*call):
        memory.call(*call)
        return memory.uses()[0][0]

    # The batch, the graph of the first partition, and of the second 1, 3 and 4, and the gradient of its output.
    assert live("backward", 0, 1, 1) == 7 + 30 + 20 + 7 + 3 + 100
    assert live("backward", 0, 1, 2) == 7 + 30 + 7 + 5
    assert live("backward", 0, 0, 0) == 7 + 5 + 5


def test_a_task_that_cannot_be_split_does_all_in_the_first_half(native):
    rows = (MemoryOp("free", 0), MemoryOp("alloc", 2, 5), MemoryOp("free", 1), MemoryOp("gradient", 2))
    one = split_task()
    one = replace(one, split=SplitWork(one.backward, Kernels(0, 0), inputs_memory=rows))
    places = Places((0,), copy_streams=False, transfer="direct")
    work = workload(1, [one], static=(StaticMemory(gradients=5),))
    memory = NativeMemory(native, work, places, ScriptedClock(), capacity=0, riding=False)
    for call in (("start",), ("forward", 0, 0, 0), ("collected", 0, 0), ("loss",), ("backward", 0, 0, 1)):
        memory.call(*call)
    assert memory.uses()[0][0] == 7 + 5
    memory.call("backward", 0, 0, 2)
    assert memory.uses()[0][0] == 7 + 5


def test_a_task_that_is_not_split_does_all_at_once(native):
    work = workload(1, [task(input_bytes=(1000,), output_bytes=(100,), graph_memory=(MemoryOp("alloc", 0, 10),))])
    places = Places((0,), copy_streams=False, transfer="direct")
    memory = NativeMemory(native, work, places, ScriptedClock(), capacity=0, riding=False)
    for call in (("start",), ("forward", 0, 0, 0), ("collected", 0, 0), ("loss",), ("backward", 0, 0, 1)):
        memory.call(*call)
    assert memory.uses()[0][0] == 1000
    memory.call("backward", 0, 0, 2)
    assert memory.uses()[0][0] == 1000


def test_a_cell_of_the_runtime_keeps_its_inputs_until_it_is_recomputed(native):
    cell = task(input_bytes=(1000,), output_bytes=(100,), graph_memory=(MemoryOp("alloc", 0, 10),))
    work = workload(1, [cell, cell])
    places = Places((0, 0), copy_streams=False, transfer="direct")
    memory = NativeMemory(native, work, places, ScriptedClock(), capacity=0, riding=False, scheduled=True)
    for call in (("start",), ("forward", 0, 0, 3), ("collected", 0, 0), ("forward", 0, 1, 3), ("collected", 0, 1)):
        memory.call(*call)
    # The batch, what the first partition gave, and what the second gave.
    assert memory.uses()[0][0] == 1000 + 100 + 100
    memory.call("recompute", 0, 1)
    assert memory.uses()[0][0] == 1000 + 100 + 10
