"""Cell by cell: what counts as the same cell, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpipe_bench.components import Components
from gpipe_bench.suite.evaluation.compare import cells_to_test, compare_rows, distinct_rows
from gpipe_bench.suite.running.run import failed_result
from tests.suite.cells_of import cell, ok_result


def rows(variant, *throughputs, **values):
    return [ok_result(variant, repeat, value, **values).row for repeat, value in enumerate(throughputs)]


def simulated(variant, throughput, profile="p40"):
    (row,) = rows(variant, throughput)
    return replace(row, evidence="simulated", profile=profile, repeat=None)


def verdicts(new, old, **options):
    return {found.row.variant: found.verdict for found in compare_rows(new, old, **options)}


LOW, HIGH = (1.0, 1.1, 1.2, 1.3), (2.0, 2.1, 2.2, 2.3)


def test_one_cell_is_tested_by_itself():
    assert verdicts(rows("baseline", *HIGH), rows("baseline", *LOW)) == {"baseline": "differs"}


NAMES = ("baseline", "dep-x-x", "dep-x-ptl")


def test_p_values_of_several_cells_are_adjusted():
    """p is 2/70 for four against four; after Benjamini and Hochberg three alike stay, and one alone is tripled."""
    old = [row for name in NAMES for row in rows(name, *LOW)]
    found = compare_rows([row for name in NAMES for row in rows(name, *HIGH)], old)
    assert [(each.verdict, each.p_adjusted) for each in found] == [("differs", pytest.approx(2 / 70))] * 3
    new = [row for name in NAMES for row in rows(name, *(HIGH if name == "baseline" else LOW))]
    first, *others = compare_rows(new, old)
    assert (first.verdict, first.p_adjusted) == ("too few repeats", pytest.approx(6 / 70))
    assert {each.p_adjusted for each in others} == {1.0}
    assert cells_to_test([first, *others]) == 3


def test_where_nothing_differs_one_family_in_twenty_says_so_at_most():
    rng = np.random.default_rng(20200421)
    names, draws = [components.label for components in Components.factorial()][:16], 40

    def drawn():
        return [row for name in names for row in rows(name, *rng.lognormal(sigma=0.04, size=6))]

    said = [any(each.verdict == "differs" for each in compare_rows(drawn(), drawn())) for _ in range(draws)]
    assert sum(said) <= draws * (0.05 + 2 * (0.05 * 0.95 / draws) ** 0.5)


def test_cells_with_too_few_repeats_do_not_burden_the_others():
    new = [*rows("baseline", *HIGH), *rows("dep-x-x", 2.0, 2.1)]
    old = [*rows("baseline", *LOW), *rows("dep-x-x", 1.0, 1.1)]
    assert verdicts(new, old) == {"baseline": "differs", "dep-x-x": "too few repeats"}


def test_simulated_values_have_no_scatter():
    new = [simulated("baseline", 10.0), simulated("dep-x-x", 10.0)]
    old = [simulated("baseline", 10.0), simulated("dep-x-x", 10.01)]
    assert verdicts(new, old) == {"baseline": "equal", "dep-x-x": "differs"}


def test_two_profiles_are_two_cells():
    found = compare_rows([simulated("baseline", 10.0, "h100")], [simulated("baseline", 10.0, "p40")])
    assert sorted(each.verdict for each in found) == ["missing", "new"]


def test_two_schedules_are_two_cells():
    other = [replace(row, backward="scheduled", schedule="1f1b") for row in rows("baseline", 10.0)]
    gpipe = [replace(row, schedule="gpipe") for row in other]
    assert sorted(each.verdict for each in compare_rows(other, gpipe)) == ["missing", "new"]


def test_evidence_can_be_set_against_evidence():
    # Simulations alone have a flavour, which is no difference then.
    new, old = [replace(simulated("baseline", 11.0), flavour="published")], rows("baseline", 10.0)
    assert sorted(verdicts(new, old).values()) == ["new"]
    (found,) = compare_rows(new, old, across=("evidence",))
    assert found.comparison is not None
    assert found.comparison.ratio.median == pytest.approx(1.1)


def test_a_status_that_changed_is_a_difference():
    failed = failed_result(cell(variant="baseline"), 0, "oom", "MemoryError").row
    (found,) = compare_rows([failed], rows("baseline", 10))
    assert (found.verdict, found.alike) == ("status changed", False)
    (same,) = compare_rows([failed], [failed])
    assert (same.verdict, same.alike) == ("no value", True)


def test_a_share_of_zero_has_no_ratio():
    (found,) = compare_rows(rows("baseline", 1.0), rows("baseline", 1.0), "copy_fraction")
    assert found.comparison is None


def test_cells_that_experiments_share_count_once():
    shared = [replace(row, experiment=name) for name in ("ablation", "sweep") for row in rows("baseline", *HIGH)]
    assert len(distinct_rows(shared)) == len(HIGH)


def test_a_key_that_is_none_is_refused():
    with pytest.raises(ValueError, match="across must name keys of a cell, got 'device'"):
        compare_rows([], [], across=("device",))
