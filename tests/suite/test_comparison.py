"""Published, simulated and error stand in one line; shares add up."""

from __future__ import annotations

import io

from rich.console import Console

from gpipe_bench.components import Components
from gpipe_bench.results.rows import Row
from gpipe_bench.suite.evaluation.summary import print_summary
from tests.suite.cells_of import ok_result

SETTING = {
    "model": "unet",
    "model_args": "depth=1",
    "partitions": 4,
    "chunks": 8,
    "checkpoint": "except_last",
    "batch_size": 128,
    "balance": "1-2-3-4",
}


def row(evidence, variant, speed, memory, **values):
    return Row(
        evidence=evidence, variant=variant, throughput_samples_per_s=speed, peak_reserved_gib=memory,
        peak_allocated_gib=memory, device="cuda X", profile="p40" if evidence == "simulated" else "",
        **{**SETTING, **values},
    )  # fmt: skip


def factorial():
    """Every component brings its position, whatever the others."""
    names = [name for name in Components.__slots__ if name != "shared"]
    gains = dict(zip(names, (1, 2, 3, 4, 5), strict=True))
    rows = []
    for components in Components.factorial():
        on = [gain for name, gain in gains.items() if getattr(components, name)]
        rows.append(row("simulated", components.label, 10.0 + sum(on), 30.0 - len(on), repeat=0, flavour="published"))
    return rows


PRINTED = [row("published", "baseline", 20.0, 20.0, utilization_fraction=0.5)]


def printed(rows):
    out = io.StringIO()
    print_summary(rows, (), Console(file=out, width=160, highlight=False))
    return out.getvalue()


def block(text, title):
    return [line.split() for line in text.split(title)[1].split("\n\n")[0].splitlines()]


def test_published_simulated_and_error_stand_side_by_side():
    lines = block(printed([*PRINTED, *factorial()]), "against the published values")
    # all but fork and join, copy streams and portals are on: 10 + 1 + 5
    assert ["baseline", "20.0", "16.0", "-20.0%", "20.0", "28.0", "+40.0%", "50%"] in lines


def test_published_rows_are_no_runs_and_have_no_table_of_their_own():
    text = printed([*PRINTED, *factorial()])
    assert "32 runs (32 simulated): 32 ok" in text
    assert text.count("x baseline") == 1


def test_published_rows_of_other_settings_stand_alone():
    other = row("published", "baseline", 20.0, 20.0, batch_size=64)
    text = printed([other, *factorial()])
    assert "against the published values" not in text
    assert text.count("x baseline") == 2


def test_shares_of_a_complete_factorial():
    lines = block(printed(factorial()), "share of each component, simulated")
    assert ["clock_cycle", "+1.0", "[+1.0,", "+1.0]", "-1.0", "[-1.0,", "-1.0]"] in lines
    assert ["early_recompute", "+5.0", "[+5.0,", "+5.0]", "-1.0", "[-1.0,", "-1.0]"] in lines


def test_no_shares_where_a_combination_has_no_value():
    assert "share of each component" not in printed(factorial()[1:])


def test_a_measured_table_has_no_error_column():
    assert "error" not in printed([*PRINTED, ok_result().row])
