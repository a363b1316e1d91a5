"""Spans of partitions that share a graph: never more memory than with a graph for each task."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.components import Components
from gpipe_bench.engine.spans import Sizes, spans_of
from gpipe_bench.program import Plan, backward_order


def chain(*weights: int, passed: int) -> tuple[Sizes, ...]:
    """Partitions that pass ``passed`` bytes on."""
    return tuple(Sizes(each, came := passed if j else 0, passed, kept_inputs=came) for j, each in enumerate(weights))


def order_of(m, n, *, clock_cycle=True):
    return backward_order(Plan(m, n, Components(clock_cycle=clock_cycle)))


def spanned(starts, m, n):
    ends = [*starts[1:], n]
    return [
        (i, j)
        for start, end in reversed([*zip(starts, ends, strict=True)])
        for i in reversed(range(m))
        for j in reversed(range(start, end))
    ]


def most_alive(sizes, order):
    """Bytes of all tensors by name, task by task."""
    m, last = 1 + max(i for i, _ in order), len(sizes) - 1
    tasks = [(i, j) for i in range(m) for j in range(last + 1)]
    alive = {("inner", i, j): sizes[j].inner for i, j in tasks}
    # What comes into a task, or its part that somebody keeps; and who will need it still.
    kept = {("input", i, j): (sizes[j - 1].kept_outputs, sizes[j].kept_inputs) for i, j in tasks if j}
    alive |= {name: max(by) for name, by in kept.items()}
    alive |= {("output", i): sizes[last].kept_outputs for i in range(m)}
    alive["gradients of outputs"] = m * sizes[last].outputs
    most, left = 0, m
    for i, j in order:
        made = {("made", j): sizes[j].weights, ("gradient", i, j): sizes[j].inputs}
        most = max(most, sum(alive.values()) + sum(made.values()))
        alive["weights", j] = sizes[j].weights
        alive["gradient", i, j] = sizes[j].inputs
        del alive["inner", i, j]
        if j:
            # The one before may need some of it still.
            alive["input", i, j] = kept["input", i, j][0]
        if j < last:
            del alive["gradient", i, j + 1], alive["input", i, j + 1]
        else:
            left -= 1
            del alive["output", i]
            if not left:
                del alive["gradients of outputs"]
    return most


def test_one_span_does_where_weights_are_small():
    assert spans_of(chain(8, 8, 8, 8, passed=16), (True,) * 4, 8, clock_cycle=True) == (0,)


def test_one_span_does_where_there_is_nothing_but_weights():
    assert spans_of(chain(8, 8, 8, 8, passed=0), (True,) * 4, 8, clock_cycle=True) == (0,)


def test_more_are_needed_in_between():
    sizes = chain(*[80] * 8, passed=16)
    assert spans_of(sizes, (True,) * 8, 8, clock_cycle=True) == (0, 5)
    assert most_alive(sizes, spanned((0,), 8, 8)) > most_alive(sizes, order_of(8, 8))


def test_more_are_needed_where_tasks_may_keep_what_they_make():
    """Then memory falls sooner with a graph for each task, and gradients of a whole span stand out."""
    plain = chain(*[100] * 6, passed=60)
    assert spans_of(plain, (True,) * 6, 8, clock_cycle=True) == (0, 4)
    kept = tuple(each._replace(inner=20) for each in plain)
    assert spans_of(kept, (True,) * 6, 8, clock_cycle=True) == (0, 5)
    much = tuple(each._replace(inner=64) for each in chain(*[131] * 6, passed=8))
    assert spans_of(much, (True,) * 6, 8, clock_cycle=True) == (0, 1, 5)


def test_gradients_that_pile_up_between_spans_count():
    """The input of the second partition stays, since the first one keeps it: gradients of a whole span come on top."""
    sizes = (
        Sizes(1000, 0, 100, kept_outputs=100),
        Sizes(1000, 100, 10, kept_inputs=100, kept_outputs=10),
        Sizes(10, 10, 10, kept_inputs=10, kept_outputs=10),
    )
    assert most_alive(sizes, spanned((0, 1), 16, 3)) > most_alive(sizes, order_of(16, 3))
    assert spans_of(sizes, (True,) * 3, 16, clock_cycle=True) not in {(0, 1), (0, 1, 2)}


def test_none_do_where_a_skip_forbids_to_cut():
    assert spans_of(chain(*[80] * 8, passed=16), (True, *[False] * 7), 8, clock_cycle=True) is None


def test_microbatch_after_microbatch_is_what_one_span_does():
    assert spans_of(chain(*[80] * 8, passed=16), (True,) * 8, 8, clock_cycle=False) == (0,)


@st.composite
def chains(draw):
    n = draw(st.integers(2, 7))
    values = draw(st.lists(st.integers(0, 40), min_size=n, max_size=n))
    weights = draw(st.lists(st.integers(0, 200), min_size=n, max_size=n))
    inner = draw(st.lists(st.integers(0, 60), min_size=n, max_size=n))
    inputs = [0, *values[:-1]]
    # A tensor is kept by whoever makes it, by whoever takes it, by both or by neither.
    takers, makers = (draw(st.lists(st.booleans(), min_size=n, max_size=n)) for _ in range(2))
    kept = ([each * own for each, own in zip(of, by, strict=True)] for of, by in ((inputs, takers), (values, makers)))
    sizes = tuple(Sizes(*each) for each in zip(weights, inputs, values, inner, *kept, strict=True))
    return sizes, (True, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1)))


@given(chains(), st.integers(1, 9), st.booleans())
@settings(max_examples=300, deadline=None)
def test_spans_begin_where_they_may_and_take_no_more_memory(chain_of, m, clock_cycle):
    sizes, cuts = chain_of
    starts = spans_of(sizes, cuts, m, clock_cycle=clock_cycle)
    # Whether tasks keep their inner values or not.
    ways = sizes, [each._replace(inner=0) for each in sizes]
    order = order_of(m, len(sizes), clock_cycle=clock_cycle)
    most = [most_alive(way, order) for way in ways]
    if starts is None:
        one = [most_alive(way, spanned((0,), m, len(sizes))) for way in ways]
        assert one[0] > most[0] or one[1] > most[1]
    else:
        assert starts[0] == 0
        assert [*starts] == sorted(set(starts))
        assert all(cuts[start] for start in starts)
        for way, limit in zip(ways, most, strict=True):
            assert most_alive(way, spanned(starts, m, len(sizes))) <= limit
