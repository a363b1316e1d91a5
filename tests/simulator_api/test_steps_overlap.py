"""Whether steps overlap: what a simulated step that ends on all devices takes, and what its row says."""

from __future__ import annotations

import pytest

from gpipe_bench.figures.groups import setting_words
from gpipe_bench.results.labels import training_words
from gpipe_bench.results.outcomes import group_rows
from gpipe_bench.results.rows import Row
from gpipe_bench.schedules.table import SCHEDULES, partition_count
from gpipe_bench.simulator import Model, simulate
from gpipe_bench.suite.evaluation.compare import compare_rows
from gpipe_bench.suite.running.simulated import simulate_cells
from gpipe_bench.suite.simulated_cells import SimulatedCell

VIT = Model("vit", {"L": 4, "D": 128, "heads": 2})


def step(schedule, **options):
    n = partition_count(schedule, 2)
    layers = [10 // n + (j < 10 % n) for j in range(n)]
    return simulate(VIT, balance=layers, batch_size=8, chunks=4, checkpoint="never", schedule=schedule,
                    profile="h100", **options)  # fmt: skip


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_a_step_between_idle_devices_takes_no_less_and_has_the_memory_of_every_step(schedule):
    overlapping, apart, single = (
        step(schedule),
        step(schedule, steps_overlap=False),
        step(schedule, steps=1),
    )
    assert apart.step_time_ms == single.step_time_ms
    assert apart.step_time_ms >= overlapping.step_time_ms
    assert [use.peak_reserved_gib for use in apart.devices] == [use.peak_reserved_gib for use in overlapping.devices]
    assert [one.row().steps_overlap for one in (overlapping, apart, single)] == [True, False, False]


def test_state_that_comes_after_the_first_step_counts_where_steps_do_not_overlap():
    both = [step("1f1b", optimizer="adam", steps_overlap=overlap) for overlap in (True, False)]
    assert both[0].peak_allocated_gib == both[1].peak_allocated_gib > step("1f1b", steps=1).peak_allocated_gib


def test_overlap_decides_what_zero_bubble_is_worth():
    """Devices that need not start together hide what ``zb_h2`` waits before its first and after its last action."""

    def time_ms(schedule, **options):
        settings = {"balance": [5, 5, 5, 5], "batch_size": 64, "chunks": 8, "checkpoint": "never", "memory": False}
        model = Model("vit", {"L": 9, "D": 1280, "heads": 16})
        return simulate(model, **settings, schedule=schedule, profile="h100", **options).step_time_ms

    assert time_ms("1f1b") == time_ms("1f1b", steps_overlap=False)
    assert time_ms("zb_h2") < 0.95 * time_ms("zb_h2", steps_overlap=False)


def test_cells_keep_their_keys_and_those_whose_steps_do_not_overlap_have_their_own():
    usual = SimulatedCell()
    apart = usual.changed(steps_overlap=False)
    assert "steps_overlap" not in usual.settings()
    assert apart.settings()["steps_overlap"] is False
    assert usual.id != apart.id
    rows = [result.row for result in simulate_cells([usual, apart], timelines=())]
    assert [row.steps_overlap for row in rows] == [True, False]


def made(throughput, **columns):
    return Row(evidence="simulated", model="vit", throughput_samples_per_s=throughput, **columns)


def pairs(new, old):
    return sorted((cell.values, cell.reference_values) for cell in compare_rows(new, old))


def test_steps_that_overlap_are_compared_with_their_like_and_with_older_rows():
    new = [made(3.0, steps_overlap=True), made(2.0, steps_overlap=False)]
    assert pairs(new, [made(3.0)]) == [((2.0,), ()), ((3.0,), (3.0,))]
    assert pairs(new, new) == [((2.0,), (2.0,)), ((3.0,), (3.0,))]


def test_precisions_and_optimizers_are_compared_with_their_like_and_with_older_rows():
    usual, adam = made(3.0, precision="float32", optimizer="sgd"), made(2.0, precision="float32", optimizer="adam")
    half = made(9.0, precision="bfloat16", optimizer="adamw")
    rows = [usual, adam, half]
    assert pairs(rows, rows) == [((speed,), (speed,)) for speed in (2.0, 3.0, 9.0)]
    # Older rows say neither; they are all in float32, and each of them has one optimizer.
    assert pairs([adam, half], [made(2.5)]) == [((2.0,), (2.5,)), ((9.0,), ())]


def test_groups_and_titles_tell_precisions_optimizers_and_steps_apart():
    rows = [
        made(3.0, variant="dep-str-ptl"),
        made(2.0, variant="dep-str-ptl", steps_overlap=False),
        made(9.0, variant="dep-str-ptl", precision="bfloat16", optimizer="adamw"),
    ]
    groups = group_rows(rows)
    assert [outcome.ok for group in groups for outcome in group.outcomes.values()] == [[row] for row in rows]
    words = ["", "steps do not overlap", "bfloat16, adamw"]
    assert [training_words(group.head) for group in groups] == words
    assert all(word in setting_words(row).replace("\u00a0", " ") for word, row in zip(words, rows, strict=True))
