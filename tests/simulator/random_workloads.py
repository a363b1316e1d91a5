"""Workloads drawn at random, with requests for memory: their blocks leave, return, stay, or are passed on."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from gpipe_bench.simulator.workloads.workload import (
    NOTHING,
    Kernels,
    MemoryOp,
    SkipWork,
    SplitWork,
    StaticMemory,
    TaskWork,
    Workload,
    gradient_name,
    input_name,
)
from tests.simulator.support import Plain

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
def split(draw, whole):
    """The same workload with backward passes in two parts."""
    work = draw(whole)
    parts = tuple(
        {size: replace(one, split=draw(halves(one))) for size, one in works.items()} for works in work.partitions
    )
    return replace(work, partitions=parts)


@st.composite
def halves(draw, work):
    """I and W: W makes the gradients of parameters, frees what I left, and holds some of what returns."""
    ops, returning = work.backward_memory, work.returning
    times = draw(KERNELS), draw(st.just(NOTHING) | KERNELS)
    if draw(st.integers(0, 5)) == 0:
        return SplitWork(*times, ops, (), returning)
    if not returning and draw(st.booleans()):
        return SplitWork(NOTHING, times[0], (), ops)
    made = {op.block for op in ops if op.kind in {"gradient", "view"}}
    temporary = {op.block for op in ops if op.kind == "alloc"} - made
    late = {op for op in ops if op.kind == "free" and op.block not in temporary and draw(st.booleans())}
    own = dict.fromkeys(name for name in returning if name >= 0 and draw(st.booleans()))
    between = draw(st.lists(SIZES, max_size=2))
    inputs = [op for op in ops if op.block not in made and op not in late]
    inputs += [MemoryOp("alloc", 300 + place, nbytes) for place, nbytes in enumerate(between)]
    weights = [op for op in ops if op.block in made and op.kind == "alloc"]
    weights += [op for op in ops if op in late]
    weights += [MemoryOp("free", name) for name in own]
    weights += [MemoryOp("free", 300 + place) for place in range(len(between)) if draw(st.booleans())]
    weights += [op for op in ops if op.block in made and op.kind != "alloc"]
    return SplitWork(*times, tuple(inputs), tuple(weights), returning)


@st.composite
def shared(draw, names):
    """Names of which one may stand twice."""
    if len(names) < 2 or draw(st.booleans()):
        return names
    first, second = draw(st.permutations(range(len(names))))[:2]
    return tuple(names[first] if place == second else name for place, name in enumerate(names))
