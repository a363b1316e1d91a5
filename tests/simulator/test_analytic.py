"""A closed form beside the simulation: per direction one micro-batch goes all the way, the others queue at the slowest.

    forward    sum of F and C over the chain + (m-1) times the largest of them
    backward   the same for B, with R before it, and gradients' copies

Copies and computations are stations of one chain. Where nothing overlaps between the directions the form is exact;
recomputation ahead of its gradient may only gain, and at most what is recomputed on the way of one micro-batch; and no
device, no link and no micro-batch can be faster than what it has to do.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.components import Components
from gpipe_bench.simulator.steps.run import Settings, run
from gpipe_bench.simulator.workloads.workload import Kernels, TaskWork, Workload
from tests.simulator.support import Plain

EXAMPLES = settings(max_examples=100)
TIMES = st.integers(1, 60)
CHAINS = st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=6)
MICROBATCHES = st.integers(1, 9)


def made(m, chain, loss=0):
    """Partitions with (forward, backward); a recomputation is a forward pass."""
    works = [
        TaskWork(Kernels(forward), Kernels(forward), Kernels(backward), input_bytes=(1,), output_bytes=(1,))
        for forward, backward in chain
    ]
    return Workload(tuple({1: work} for work in works), (1,) * m, loss=Kernels(loss, loss > 0))


def makespan(m, chain, copy, checkpoint, loss=0, **switches):
    chosen = Settings(Components(**switches), checkpoint, memory=False)
    return run(made(m, chain, loss), Plain(copy=copy), chosen).makespan_ns


def along(m, tasks, copy):
    """One direction: tasks and the copies between them."""
    stations = [*tasks, *([copy] * (len(tasks) - 1))]
    return sum(stations) + (m - 1) * max(stations)


@EXAMPLES
@given(m=MICROBATCHES, forward=TIMES, backward=TIMES, n=st.integers(1, 6), copy=st.integers(0, 90), loss=TIMES)
def test_equal_partitions_without_checkpoints_take_just_that(m, forward, backward, n, copy, loss):
    closed = along(m, [forward] * n, copy) + loss + along(m, [backward] * n, copy)
    assert makespan(m, [(forward, backward)] * n, copy, "never", loss) == closed


@EXAMPLES
@given(m=MICROBATCHES, forward=TIMES, backward=TIMES, n=st.integers(1, 6), copy=st.integers(0, 90))
def test_equal_partitions_that_recompute_late_take_just_that(m, forward, backward, n, copy):
    closed = along(m, [forward] * n, copy) + along(m, [forward + backward] * n, copy)
    assert makespan(m, [(forward, backward)] * n, copy, "always", early_recompute=False) == closed


@EXAMPLES
@given(m=MICROBATCHES, chain=CHAINS, copy=st.integers(0, 90))
def test_it_is_exact_forward_whatever_the_partitions(m, chain, copy):
    found = run(made(m, chain), Plain(copy=copy), Settings(checkpoint="never", memory=False))
    ends = [event.end_us for event in found.events if event.kind == "forward"]
    assert round(1000 * max(ends)) == along(m, [forward for forward, _ in chain], copy)


@EXAMPLES
@given(
    m=MICROBATCHES,
    chain=CHAINS,
    copy=st.integers(0, 90),
    checkpoint=st.sampled_from(["always", "except_last", "never"]),
    early=st.booleans(),
)
def test_it_is_a_bound_from_above_and_the_busiest_device_one_from_below(m, chain, copy, checkpoint, early):
    found = makespan(m, chain, copy, checkpoint, early_recompute=early)
    again = {"always": m, "except_last": m - 1, "never": 0}[checkpoint]
    forward = [one for one, _ in chain]
    backward = [other + one * (again > 0) for one, other in chain]
    assert found <= along(m, forward, copy) + along(m, backward, copy)
    once = sum(map(sum, chain)) + 2 * (len(chain) - 1) * copy
    busiest = max((m + again) * one + m * other for one, other in chain)
    assert found >= max(once, busiest, 2 * m * copy * (len(chain) > 1))


@EXAMPLES
@given(m=MICROBATCHES, forward=TIMES, backward=TIMES, n=st.integers(1, 6), copy=st.integers(0, 5))
def test_early_recomputation_gains_what_is_recomputed_on_the_way(m, forward, backward, n, copy):
    # On every device but the last, whose gradients are there at once; copies shorter than tasks.
    chain = [(10 * forward, 10 * backward)] * n
    late, early = (makespan(m, chain, copy, "always", early_recompute=flag) for flag in (False, True))
    assert late - early == (n - 1) * 10 * forward
