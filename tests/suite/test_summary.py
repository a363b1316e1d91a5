"""The table says what was measured, how sure it is, what failed and why."""

from __future__ import annotations

import io
import re
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from gpipe_bench.results.intervals import ratio_interval
from gpipe_bench.results.outcomes import group_rows
from gpipe_bench.suite.evaluation.summary import print_summary, result_files
from gpipe_bench.suite.running.run import failed_result
from tests.figures.synthetic import cpu_ways
from tests.suite.cells_of import cell, ok_result


def printed(rows, files=(), width=160):
    out = io.StringIO()
    print_summary(rows, files, Console(file=out, width=width, highlight=False))
    return out.getvalue()


def cells(text):
    """What the lines of the variants hold beside the names of the variants."""
    names = ("baseline", "dep-x-ptl-x-rec")
    return [word for line in map(str.split, text.splitlines()) if line[:1] and line[0] in names for word in line[1:]]


def line(text, variant):
    (found,) = (words for words in map(str.split, text.splitlines()) if words[:1] == [variant])
    return found


def unsupported(variant):
    made = cell(variant=variant)
    return failed_result(made, 0, "unsupported", made.unsupported()).row


BASE = [ok_result("baseline", repeat, value).row for repeat, value in enumerate([10, 11, 12, 13])]
FAST = [ok_result("dep-x-x", repeat, value).row for repeat, value in enumerate([20, 22, 24, 26])]


def test_a_line_has_repeats_medians_intervals_memory_and_shares():
    words = line(printed([*BASE, *FAST]), "dep-x-x")
    _, ratio, low, high = ratio_interval([20, 22, 24, 26], [10, 11, 12, 13])
    assert ratio == 2
    assert words == [
        *("dep-x-x", "4", "23.0", "[20.0,", "26.0]", "2.00", f"[{low:.2f},", f"{high:.2f}]*", "noisy"),
        *("128.0", "50%", "25%", "33%", "25%", "0%", "12%", "ok"),
    ]


def test_only_a_ratio_with_a_wide_interval_is_noisy():
    assert "noisy" in line(printed([*BASE[1:3], *FAST]), "dep-x-x")
    assert "noisy" not in line(printed([*BASE[1:3], *FAST[1:3]]), "dep-x-x")
    assert "noisy" not in line(printed([*BASE, *FAST]), "baseline")


def test_the_baseline_is_its_own_measure():
    assert line(printed([*BASE, *FAST]), "baseline")[5:7] == ["1", "128.0"]


def test_with_few_repeats_no_difference_is_claimed():
    assert "2.00" in printed([*BASE[:3], *FAST[:3]])
    assert "]*" not in printed([*BASE[:3], *FAST[:3]])


def test_one_repeat_has_no_interval():
    assert line(printed([*BASE[:1], *FAST[:1]]), "dep-x-x")[:4] == ["dep-x-x", "1", "20.0", "2.00"]


def test_without_a_baseline_there_is_no_ratio():
    assert line(printed(FAST[:1]), "dep-x-x")[2:4] == ["20.0", "128.0"]


def test_large_memory_is_in_gib_and_what_the_allocator_reserved_stands_beside_it():
    rows = [ok_result("baseline", peak_allocated_gib=20.25, peak_reserved_gib=23.5).row]
    assert "20.2 (23.5)" in printed(rows)
    assert "GiB (reserved)" in printed(rows)
    assert "reserved" not in printed(BASE)


def test_one_value_each_has_no_column_of_intervals():
    assert "95 % CI" not in printed([*BASE[:1], *FAST[:1]]).partition("runs")[0]


def test_a_simulation_says_whose_autograd_engine_it_is_of():
    rows = [replace(BASE[0], evidence="simulated", flavour=flavour) for flavour in ("published", "current")]
    text = " ".join(printed(rows).split())
    assert "autograd of PyTorch 1.3" in text
    assert "autograd of PyTorch 2" in text


def test_unsupported_variants_share_a_footnote():
    text = printed([*BASE, unsupported("dep-str-x"), unsupported("dep-str-ptl")])
    assert line(text, "dep-str-x") == ["dep-str-x", "0", "unsupported", "[1]"]
    assert line(text, "dep-str-ptl")[-2:] == ["unsupported", "[1]"]
    assert text.count("[1] unsupported: copy_streams needs an accelerator\n") == 1
    assert "6 runs (6 measured): 4 ok, 2 unsupported" in text
    assert "FAILED" not in text


def test_a_cpu_compares_ways_to_run_with_the_plain_loop():
    text = printed(cpu_ways())
    assert "x plain loop" in " ".join(text.split())
    assert re.search(r"^ *plain loop +3 +100\.0 .* 1 ", text, re.MULTILINE)
    assert re.search(r"^ *paper's executor +3 +150\.0 .* 1\.50 \[", text, re.MULTILINE)
    assert re.search(r"^ *zb_v +0 .*error \[1\]", text, re.MULTILINE)
    assert text.index("1f1b") > text.index("paper's executor") > text.index("plain loop ")


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_digit_is_lost_whatever_the_width(width):
    """Everything of a wide table stands in the narrow one, and no line is longer than the terminal."""
    memory = {"peak_allocated_gib": 20.25, "peak_reserved_gib": 23.5}
    rows = [
        ok_result(variant, repeat, 1000 * value, **memory).row
        for variant in ("baseline", "dep-x-ptl-x-rec")
        for repeat, value in enumerate([10.01, 11.02, 12.03, 13.04])
    ]
    narrow, wide = printed(rows, width=width), printed(rows, width=400)
    assert max(map(len, narrow.splitlines())) <= width
    assert "…" not in narrow
    assert Counter(cells(narrow)) == Counter(cells(wide))
    assert "[10010.0, 13040.0]" in narrow


@pytest.mark.parametrize("status", ["oom", "error", "skipped"])
def test_failures_are_loud(status):
    failed = failed_result(cell(variant="dep-x-x"), 4, status, "SomeError: it broke; so it did").row
    text = printed([*BASE, *FAST, failed])
    assert line(text, "dep-x-x")[-3:] == ["ok,", status, "[1]"]
    assert f"[1] {status}: SomeError: it broke; so it did" in text
    assert f"FAILED: 1 {status}" in text.splitlines()[-1]


def test_reasons_are_shown_as_they_are():
    text = printed([failed_result(cell(), 0, "error", "KeyError: [bold] is no markup [/]").row])
    assert "KeyError: [bold] is no markup [/]" in text


def test_published_variants_come_first_whatever_the_order_of_rows():
    rows = [ok_result(variant).row for variant in ("x-x-x-x-x", "dep-x-ptl", "dep-x-x", "baseline")]
    (group,) = group_rows([unsupported("dep-str-ptl"), *rows])
    labels = [outcome.variant for outcome in group.ordered()]
    assert labels == ["baseline", "dep-x-x", "dep-str-ptl", "dep-x-ptl", "x-x-x-x-x"]


def test_what_must_not_be_compared_stands_in_tables_of_its_own():
    other_machine = [replace(row, device="cpu Model Y") for row in BASE]
    simulated = [replace(row, evidence="simulated") for row in BASE]
    other_model = [replace(row, model_args="depth=3") for row in BASE]
    groups = group_rows([*BASE, *other_machine, *simulated, *other_model, *FAST])
    assert [len(group.outcomes) for group in groups] == [2, 1, 1, 1]
    assert printed([*BASE, *simulated]).count("samples/s") == 2


def test_a_failed_run_joins_the_machines_that_ran_its_setting():
    """It may know only the type of its device."""
    groups = group_rows([unsupported("dep-str-ptl"), *BASE, *(replace(row, device="cpu Model Y") for row in BASE)])
    assert [list(group.outcomes) for group in groups] == [["baseline", "dep-str-ptl"]] * 2
    (alone,) = group_rows([unsupported("dep-str-ptl")])
    assert alone.outcomes["dep-str-ptl"].failed


def test_the_files_of_an_experiment(tmp_path):
    names = [
        "results/ablation.csv",
        "results/ablation_events.csv",
        "figures/ablation.svg",
        "figures/ablation_timelines_simulated.pdf",
    ]
    names += ["results/traces/ablation/baseline.json"]
    for name in [*names, "figures/speed.svg", "results/speed.csv", "results/traces/speed/a.json"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files = result_files(tmp_path / "results" / "ablation.csv")
    assert [path.relative_to(tmp_path).as_posix() for path in files] == names
    assert printed(BASE, files).endswith("baseline.json\n")


def test_the_table_needs_no_scipy_for_few_repeats():
    """It ends every run of the workflow, and scipy takes a second to load."""
    import subprocess
    import sys

    program = """
import sys
sys.modules["scipy"] = sys.modules["torch"] = sys.modules["pandas"] = None
from tests.suite.cells_of import ok_result
from gpipe_bench.suite.evaluation.summary import print_summary
print_summary([ok_result(variant, repeat).row for variant in ("baseline", "dep-x-x") for repeat in range(3)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "dep-x-x" in done.stdout, done.stderr


def test_groups_that_are_apart_have_titles_that_differ():
    made = BASE[0]
    others = [
        *(replace(made, checkpoint="never"), replace(made, backward="scheduled"), replace(made, seed=7)),
        *(replace(made, balance="1-2-3-11"), replace(made, transfer="direct"), replace(made, schedule="zb_v")),
    ]
    titles = [line for line in printed([made, *others], width=400).splitlines() if "batch" in line]
    assert len(titles) == len(set(titles)) == 1 + len(others)
