"""Peaks of memory from times that are known beforehand are those of the clock, to the byte, or there are none."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpipe_bench.components import Components
from gpipe_bench.simulator.runs.events import Settings, run_whole
from gpipe_bench.simulator.runs.known_steps import is_known, run_known
from gpipe_bench.simulator.workloads.workload import (
    NOTHING,
    Kernels,
    MemoryOp,
    StaticMemory,
    TaskWork,
    Workload,
    gradient_name,
    input_name,
)
from tests.simulator.support import SETTINGS, Plain

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=150)
KIB = 2**10
# Few times and all multiples of one, so that much happens at once.
TIMES = st.integers(1, 12).map(lambda tens: 10 * tens)
KERNELS = st.builds(Kernels, TIMES, st.integers(1, 4))
# Of the small pool; of the large one, where the rest of a block may be too small to be split off; with its own segment.
SIZES = st.sampled_from([1, 700, 40 * KIB, 1000 * KIB, 1200 * KIB, 3000 * KIB, 11000 * KIB])


@st.composite
def passes(draw, inputs, outputs, inner=False):
    """A task whose graph keeps some blocks, and whose outputs and gradients may be blocks of it or not.

    An ``inner`` one may pass an input on, the first of the size of an output.
    """
    blocks = draw(st.lists(SIZES, min_size=1, max_size=4))
    first = len(outputs) + len(inputs)
    leaving = tuple(range(len(outputs))) if draw(st.booleans()) else ()
    returning = tuple(range(len(outputs), first)) if draw(st.booleans()) else ()
    if inner and leaving and draw(st.booleans()):
        place = draw(st.sampled_from(leaving))
        name = input_name(inputs.index(outputs[place])) if outputs[place] in inputs else -1
        leaving = (*leaving[:place], name, *leaving[place + 1 :])
    if returning and draw(st.booleans()):
        returning = (-1, *returning[1:])
    own = [MemoryOp("alloc", first + place, nbytes) for place, nbytes in enumerate(blocks)]
    out = [MemoryOp("alloc", block, outputs[block]) for block in leaving if block >= 0]
    freed = [MemoryOp("free", op.block) for op in own]
    kept = draw(st.integers(0, len(own)))
    extra = [MemoryOp("alloc", 100, draw(SIZES)), MemoryOp("free", 100)]
    parameters = [
        MemoryOp("alloc", 200 + place, nbytes) for place, nbytes in enumerate(draw(st.lists(SIZES, max_size=2)))
    ]
    back = [MemoryOp("alloc", block, inputs[block - len(outputs)]) for block in returning if block >= 0]
    # All inputs, as a linear layer's, or some, as behind a cut before a ReLU.
    known = draw(st.just(range(len(inputs))) | st.lists(st.sampled_from(range(len(inputs))), unique=True))
    made = [block for block in leaving if block >= 0]
    kept_names = [*(made if draw(st.booleans()) else ()), *map(input_name, known)]
    gone = [MemoryOp("free", block) for block in kept_names]
    if draw(st.booleans()):
        gone += [MemoryOp("free", gradient_name(place)) for place in range(len(outputs))]
    kind = st.sampled_from(["gradient", "view"])
    return {
        "forward_memory": (*own, *out, MemoryOp("scratch", 0, draw(SIZES)), *freed),
        "graph_memory": (*own, *out, *freed[kept:]),
        "backward_memory": (
            *extra, *parameters, *gone, *back, *freed[:kept], *(MemoryOp(draw(kind), op.block) for op in parameters),
        ),
        "leaving": leaving,
        "returning": returning,
    }  # fmt: skip


@st.composite
def workloads(draw, most):
    n = draw(st.integers(2, 5))
    sizes = (2,) * (draw(st.integers(2, most)) - 1) + (draw(st.sampled_from([1, 2])),)
    borders = [draw(st.lists(SIZES, min_size=1, max_size=2)) for _ in range(n + 1)]
    equal = draw(st.booleans())
    works = []
    for j in range(n):
        inputs, outputs = (tuple(border) for border in ((borders[0],) * 2 if equal else borders[j : j + 2]))
        inner = 0 < j < n - 1
        if not equal or not works:
            times = [draw(KERNELS) for _ in range(3)]
        if not equal or j < 2 or not inner:
            # Partitions between the first and the last are alike, or all are.
            memory = {size: draw(passes(inputs, outputs, inner)) for size in (1, 2)}
        works.append(
            {
                size: TaskWork(
                    *times,
                    input_bytes=inputs,
                    output_bytes=outputs,
                    **memory[size],
                    nodes=draw(st.sampled_from([1, 3, 40])),
                )
                for size in (1, 2)
            }
        )
    numbers = st.lists(SIZES, max_size=2).map(tuple)
    static = tuple(draw(st.builds(StaticMemory, numbers, SIZES, numbers, st.just(0) | SIZES)) for _ in range(n))
    update = tuple(draw(KERNELS) for _ in range(n)) if draw(st.booleans()) else ()
    loss = draw(st.just(NOTHING) | KERNELS)
    return Workload(tuple(works), sizes, loss=loss, optimizer=update, static=static if draw(st.booleans()) else ())


MACHINES = st.builds(
    Plain,
    copy=st.sampled_from([10, 20, 100]),
    launch_ns=st.sampled_from([1, 10]),
    queue_depth=st.sampled_from([0, 12, 100, 1000]),
)


def check(work, machine, chosen):
    if not is_known(work, machine, chosen):
        return False
    same(run_known(work, machine, chosen), run_whole(work, machine, chosen))
    return True


def same(short, whole):
    assert short.step_ends_ns == whole.step_ends_ns
    assert short.peak_live_bytes == whole.peak_live_bytes
    assert short.peak_allocated_bytes == whole.peak_allocated_bytes
    assert short.peak_reserved_bytes == whole.peak_reserved_bytes
    assert short.flushes == whole.flushes


@EXAMPLES
@given(work=workloads(12), machine=MACHINES, chosen=SETTINGS)
def test_peaks_are_those_of_the_clock(work, machine, chosen):
    assume(check(work, machine, chosen))


@settings(EXAMPLES, max_examples=25)
@given(work=workloads(80), machine=MACHINES, chosen=SETTINGS)
def test_with_shared_copy_streams_too(work, machine, chosen):
    assume(check(work, machine, chosen))


@pytest.mark.parametrize("kept", [(), (0,)])
@pytest.mark.parametrize("mode", ["except_last", "never"])
def test_inputs_that_a_graph_does_not_keep_go_with_its_forward_pass(kept, mode):
    # More micro-batches than copy streams, so that what comes takes the place of what went.
    work = TaskWork(
        *(Kernels(time, 1) for time in (10, 10, 20)),
        graph_memory=(MemoryOp("alloc", 0, 3000 * KIB),),
        backward_memory=(MemoryOp("free", 0), *(MemoryOp("free", input_name(place)) for place in kept)),
        input_bytes=(700, 40 * KIB),
        output_bytes=(700, 40 * KIB),
    )
    pipeline, machine = Workload(({1: work},) * 4, (1,) * 70), Plain(copy=10, launch_ns=1)
    assert check(pipeline, machine, Settings(checkpoint=mode, steps=2))


def test_threads_in_step_with_copies_of_different_lengths():
    # Backward passes without recomputation; the threads meet at many instants, with copies of one tensor and of two.
    borders = (1,), (1,), (1, 1), (1, 1), (1, 1000 * KIB), (1,)
    kernels = [(10, 10)] * 3 + [(20, 70), (10, 10)]
    works = []
    for j, (forward, backward) in enumerate(kernels):
        memory = (MemoryOp("alloc", 100, 1), MemoryOp("free", 100))
        made = tuple(MemoryOp("alloc", 2 + place, nbytes) for place, nbytes in enumerate(borders[j])) if j == 4 else ()
        work = TaskWork(
            *(Kernels(time, 2 if j == 3 and time == 70 else 1) for time in (forward, forward, backward)),
            graph_memory=memory,
            backward_memory=(*memory, *made, *(MemoryOp("free", input_name(k)) for k in range(len(borders[j])))),
            input_bytes=borders[j],
            output_bytes=borders[j + 1],
            returning=tuple(op.block for op in made),
        )
        works.append({1: work})
    work, machine = Workload(tuple(works), (1,) * 9), Plain(copy=10, launch_ns=10)
    assert check(work, machine, Settings(Components(early_recompute=False), "never"))
