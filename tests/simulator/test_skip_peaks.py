"""Peaks of memory of pipelines with skips are looked up, and are those of the clock, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpipe_bench.components import Components
from gpipe_bench.simulator.known_order.turns import Unclear
from gpipe_bench.simulator.memory_states import straight
from gpipe_bench.simulator.runs.events import Settings, run_whole
from gpipe_bench.simulator.runs.known_steps import _by_states, is_known
from gpipe_bench.simulator.workloads.workload import Kernels, MemoryOp, SkipWork, gradient_name, input_name
from tests.simulator.support import SETTINGS, Plain, task, workload
from tests.simulator.test_device_peaks import MACHINES, SIZES, passes, same, workloads

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=150)
MIB = 2**20


@st.composite
def named_skips(draw, most):
    """Any workload of the tests of peaks, with skips that are blocks of their tasks, or what came as it came.

    Some leave as the same block as an output. Some partitions take so long that the threads of others run ahead.
    """
    work = draw(workloads(most))
    ends = st.integers(0, work.n - 2).flatmap(lambda a: st.tuples(st.just(a), st.integers(a + 1, work.n - 1)))
    ways = draw(st.lists(ends, min_size=1, max_size=4))
    skips = tuple(SkipWork(str(number), *way, {1: draw(SIZES), 2: draw(SIZES)}) for number, way in enumerate(ways))
    parts = []
    for j, works in enumerate(work.partitions):
        longer = draw(st.sampled_from([1, 1, 1, 30]))
        found = {}
        for size, one in works.items():
            inputs = (*one.input_bytes, *(skip.bytes[size] for skip in skips if skip.target == j))
            outputs = (*one.output_bytes, *(skip.bytes[size] for skip in skips if skip.source == j))
            memory = draw(passes(inputs, outputs, 0 < j < work.n - 1))
            memory |= {name: draw(shared(memory[name])) for name in ("leaving", "returning") if j < work.n - 1}
            if 0 < j < work.n - 1 and memory["returning"] and draw(st.booleans()):
                place = draw(st.integers(0, len(inputs) - 1))
                name = gradient_name(draw(st.integers(0, len(outputs) - 1)))
                memory["returning"] = (*memory["returning"][:place], name, *memory["returning"][place + 1 :])
            backward = Kernels(longer * one.backward.duration_ns, 3)
            found[size] = replace(one, backward=backward, **memory)
        parts.append(found)
    return replace(work, partitions=tuple(parts), skips=skips)


@st.composite
def shared(draw, names):
    """Names of which one may stand twice."""
    if len(names) < 2 or draw(st.booleans()):
        return names
    first, second = draw(st.permutations(range(len(names))))[:2]
    return tuple(names[first] if place == second else name for place, name in enumerate(names))


def looked_up(work, machine, chosen, patience=(12, 2, 64)):
    """Check peaks that are looked up; whether they are.

    Args:
        patience: new states in a row before none are kept, the same afterwards, and passes of which none are kept.
    """
    if not is_known(work, machine, chosen):
        return False
    names = "_MISSES", "_AGAIN", "_PASSES"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(names, patience, strict=True):
            patch.setattr(straight, name, value)
        try:
            short = _by_states(work, machine, chosen, range(work.n))
        except Unclear:
            return False
    same(short, run_whole(work, machine, chosen))
    return True


PATIENCE = st.sampled_from([(12, 2, 64), (1, 1, 5), (0, 0, 1000), (10**6, 0, 1)])


@EXAMPLES
@given(work=named_skips(12), machine=MACHINES, chosen=SETTINGS, patience=PATIENCE)
def test_peaks_are_those_of_the_clock(work, machine, chosen, patience):
    assume(looked_up(work, machine, chosen, patience))


@settings(EXAMPLES, max_examples=40)
@given(work=named_skips(80), machine=MACHINES, chosen=SETTINGS, patience=PATIENCE)
def test_with_shared_copy_streams_too(work, machine, chosen, patience):
    assume(looked_up(work, machine, chosen, patience))


def stage(leaving, returning, *, skips_in=(), skips_out=(), kept=(0,)):
    """Keeps 3 MiB, and of its inputs those at the places ``kept``; gives out 2 MiB and skips of 1 MiB or more."""
    outputs, inputs = (2 * MIB, *skips_out), (2 * MIB, *skips_in)
    # Of a name that stands twice the first one counts.
    sizes = [dict(reversed(list(zip(*both, strict=False)))) for both in ((leaving, outputs), (returning, inputs))]
    out, back = ([MemoryOp("alloc", name, nbytes) for name, nbytes in of.items() if name >= 0] for of in sizes)
    return task(
        1000,
        2000,
        3,
        forward_memory=(MemoryOp("alloc", 50, 3 * MIB), *out, MemoryOp("free", 50)),
        graph_memory=(MemoryOp("alloc", 50, 3 * MIB), *out),
        backward_memory=(*back, MemoryOp("free", 50), *(MemoryOp("free", input_name(place)) for place in kept)),
        leaving=leaving,
        returning=returning,
        input_bytes=(2 * MIB,),
        output_bytes=(2 * MIB,),
    )


LEAVING = {
    "a block of its own": (0, 1),
    "the output as well": (0, 0),
    "the input as it came": (0, input_name(0)),
    "made at the end": (0, -1),
}
RETURNING = {
    "a block of its own": (10, 11),
    "the gradient as it came": (10, gradient_name(0)),
    "made at the end": (10, -1),
}


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("leaving", LEAVING.values(), ids=LEAVING)
@pytest.mark.parametrize("returning", RETURNING.values(), ids=RETURNING)
def test_a_skip_may_be(leaving, returning, mode):
    plain, nbytes = stage((0,), (10,)), MIB + 512
    stashing, popping = stage(leaving, (10,), skips_out=(nbytes,), kept=()), stage((0,), returning, skips_in=(nbytes,))
    work = workload(40, [stage((0,), ()), stashing, plain, plain, popping, plain], [(1, 4)])
    work = replace(work, skips=(SkipWork("0", 1, 4, {1: nbytes}),))
    chosen = Settings(Components(early_recompute=mode == "always"), mode, steps=2)
    assert looked_up(work, Plain(copy=900, launch_ns=20), chosen)


def test_what_the_first_partition_passes_on_is_not_looked_up():
    stages = [stage((0, input_name(0)), (), skips_out=(1,)), stage((0,), (10,)), stage((0,), (10, 11), skips_in=(1,))]
    work = workload(10, stages, [(0, 2)])
    assert not looked_up(work, Plain(copy=900, launch_ns=20), Settings())
