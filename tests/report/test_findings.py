"""Findings: sentences computed from rows whose values are chosen so that the right numbers are plain."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from gpipe_bench.components import Components
from gpipe_bench.report.contents import Contents
from gpipe_bench.report.findings.ablation import ablation_findings, effects
from gpipe_bench.report.findings.collect import findings_of
from gpipe_bench.report.findings.failures import Run, failure_findings
from gpipe_bench.report.findings.finding import percent, plural
from gpipe_bench.report.findings.predictions import prediction_findings
from gpipe_bench.report.findings.races import race_findings
from gpipe_bench.report.findings.sweeps import advice_findings, sweep_findings
from gpipe_bench.report.findings.training import training_findings
from gpipe_bench.results.outcomes import group_rows
from gpipe_bench.results.peer_rows import PeerRow
from tests.figures.synthetic import ablation_row, cpu_ways

HARDWARE = {"evidence": "simulated", "device": "cuda Imaginary H9", "device_count": 4, "profile": "h9"}


def words(findings):
    """All sentences in plain letters."""
    return plain(" ".join(sentence for finding in findings for sentence in finding.sentences))


def plain(text):
    """A text without no-break spaces, and with letters for signs."""
    return text.replace("\u00a0", " ").replace("\N{MINUS SIGN}", "-").replace("\N{MULTIPLICATION SIGN}", "x")


def factorial(**changes):
    """Ordering doubles the throughput, a clock-cycle halves it, copy streams bring half more where order is on."""
    rows = []
    for components in Components.factorial():
        speed = 10.0 * (2 if components.fork_join else 1) * (0.5 if components.clock_cycle else 1)
        speed *= 1.5 if components.copy_streams and components.fork_join else 1
        memory = 30.0 if components.portals else 40.0
        rows.append(
            ablation_row(
                components.label, throughput_samples_per_s=speed, peak_reserved_gib=memory, **{**HARDWARE, **changes}
            )
        )
    return rows


def test_each_component_is_judged_by_all_pairs():
    (group,) = group_rows(factorial())
    found = {effect.component: effect for effect in effects(group)}
    assert {effect.pairs for effect in found.values()} == {16}
    assert [found["fork_join"].low, found["fork_join"].high] == [2.0, 3.0]
    assert found["fork_join"].mean == pytest.approx(6**0.5)
    assert [found["clock_cycle"].low, found["clock_cycle"].high] == [0.5, 0.5]
    assert [found["copy_streams"].low, found["copy_streams"].high] == [1.0, 1.5]


def test_an_ablation_in_sentences():
    text = words(ablation_findings(factorial(), "ablation"))
    assert "throughput goes from 5.00 to 15.0 samples/s, 3.00 x." in text
    assert "peak reserved memory goes from 40.0 to 30.0 GiB, 0.75 x." in text
    assert "ordering the backward pass (Fork and Join) +100 %, copy streams +50 %, portals 0 %." in text
    assert "Faster in every setting: ordering the backward pass (Fork and Join) +145 % (+100 % to +200 %)." in text
    assert "Slower in every setting: the clock-cycle order of tasks -50 % (-50 % to -50 %)." in text
    assert "Depends on the other components: copy streams +22 % (0 % to +50 %)." in text
    assert "No effect in any setting: portals 0 % (0 % to 0 %); early recomputation" in text


def test_published_values_stand_beside_simulated_ones():
    printed = [
        ablation_row(name, evidence="published", throughput_samples_per_s=speed, repeat=None)
        for name, speed in (("baseline", 4.0), ("dep-x-x", 6.0), ("dep-str-x", 9.0), ("dep-str-ptl", 9.9))
    ]
    (finding,) = ablation_findings([*printed, *factorial()], "ablation")
    assert finding.evidence == ("published", "simulated")
    assert "4 x cuda Imaginary H9" in plain(finding.where)
    text = words([finding])
    assert "3.00 x (published 4.00 to 9.90, 2.48 x)" in text
    assert (
        "(Fork and Join) +100 % (published +50 %), copy streams +50 % (published +50 %), portals 0 % (published" in text
    )


def test_a_component_that_was_not_run_is_left_out():
    rows = [row for row in factorial(evidence="measured") if not row.copy_streams]
    rows += [ablation_row("dep-str-ptl", evidence="measured", status="unsupported", reason="needs an accelerator")]
    text = words(ablation_findings(rows, "ablation"))
    assert "copy streams" not in text
    assert "(Fork and Join) +100 % (+100 % to +100 %)" in text


def test_a_cpu_is_judged_by_the_plain_loop():
    (finding,) = ablation_findings(cpu_ways(), "ablation")
    assert (finding.topic, finding.evidence) == ("Pipelines on a CPU", ("measured",))
    text = words([finding])
    assert "without a pipeline) reaches 100 samples/s." in text
    assert re.search(r": 1f1b 1\.80 x \(1\.7\d to 1\.8\d\), gpipe 1\.50 x \(.*\), paper's executor 1\.50 x", text)
    assert "zb_v" not in text


def sweep_row(n, m, speed, bubble, imbalance=0.0, **changes):
    values = {"partitions": n, "chunks": m, "microbatches": m, "batch_size": 64, "balance": str(n), "device_count": n}
    values |= {"throughput_samples_per_s": speed, "step_time_ms": 64e3 / speed if speed else None}
    values |= {
        "bubble_fraction": bubble,
        "imbalance_fraction": imbalance,
        "recompute_fraction": 0.0,
        "copy_fraction": 0.0,
    }
    return ablation_row("dep-str-ptl", **{**HARDWARE, **values, **changes})


OOM = {"status": "oom", "reason": "device 0 needs 9 GiB and has 8 GiB"}


def test_a_sweep_names_the_fastest_and_what_stops_it():
    rows = [
        *(sweep_row(1, 1, 100, 0.0), sweep_row(2, 1, 110, 0.4), sweep_row(4, 1, None, None, **OOM)),
        *(sweep_row(1, 2, 90, 0.0), sweep_row(2, 2, 160, 0.2, 0.1), sweep_row(4, 2, 128, 0.5, 0.25)),
        *(sweep_row(1, 4, 80, 0.0), sweep_row(2, 4, None, None, **OOM), sweep_row(4, 4, 100, 0.5)),
    ]
    text = words(sweep_findings(rows, "sweep_mine"))
    assert "The fastest is 2 partitions with 2 chunks, checkpoint except_last: 160 samples/s." in text
    assert "idle 30 % of the time: bubble 20 % (ideal bubble for these numbers: 33 %), imbalance 10 %." in text
    # 2 x 400 ms / 64 and 4 x 500 ms / 64 of device time for a sample.
    assert "With 4 partitions, throughput changes by -20 % to 128 samples/s." in text
    assert (
        "device time per sample goes from 12.5 to 31.2 ms; more is spent on bubble 13.1 ms, imbalance 6.56 ms." in text
    )
    assert "With 4 chunks it runs out of memory." in text


def test_a_sweep_without_values_has_no_finding():
    assert list(sweep_findings([sweep_row(1, m, None, None, **OOM) for m in (1, 2)], "sweep")) == []


def test_advice_counts_what_fits():
    rows = [
        sweep_row(1, 2, 90, 0.1),
        sweep_row(2, 2, 150, 0.2, peak_reserved_gib=12.0),
        sweep_row(4, 2, None, None, **OOM),
    ]
    text = words(advice_findings(rows, "advice"))
    assert "is 2 partitions with 2 chunks, checkpoint except_last: 150 samples/s. It takes 12.0 GiB" in text
    assert "Of 3 pipelines that were simulated, 2 fit." in text


def predictions(*lines):
    columns = ["table", "experiment", "metric", "published", "simulated", "error_fraction", "role"]
    return pd.DataFrame(lines, columns=columns, dtype=str)


def test_errors_are_of_predicted_values_alone():
    table = predictions(
        ("t", "a", "throughput_samples_per_s", "10", "11", "0.1", "predicted"),
        ("t", "b", "peak_reserved_gib", "10", "8", "-0.2", "predicted"),
        ("t", "c", "throughput_samples_per_s", "10", "19", "0.9", "fitted"),
        ("t", "d", "peak_reserved_gib", "", "", "", "predicted"),
        ("t", "e", "peak_reserved_gib", "10", "", "", "predicted"),
    )
    text = words(prediction_findings(table, "predictions"))
    assert "The mean absolute error of 2 predicted values is 15.0 %." in text
    assert "throughput 10.0 % (1), peak memory 20.0 % (1)" in text
    assert "The largest error is -20 %, peak memory of b in t: 8.00 simulated, 10.0 published." in text
    assert "Constants were fitted to 1 more value" in text
    assert "1 value ran out of memory both in print and in the simulation." in text
    assert "1 value ran out of memory in print or in the simulation alone: the simulator is wrong." in text


def test_another_table_is_no_prediction():
    assert list(prediction_findings(pd.DataFrame({"metric": ["a"]}), "predictions")) == []


def test_training_counts_verdicts_for_each_reference():
    columns = ["evidence", "model", "arm", "reference", "quantity", "verdict", "device", "normalisation", "batch_norms"]
    pipeline = ("measured", "unet", "pipeline")
    lines = [
        (*pipeline, "accumulated", "loss_last_to_accumulated", "exact", "cpu I", "batch", "4"),
        (*pipeline, "accumulated", "gradient_difference_accumulated_largest", "exact", "cpu I", "batch", "4"),
        (*pipeline, "plain", "accuracy_fraction", "equivalent", "cpu I", "batch", "4"),
        (*pipeline, "plain", "loss_last_to_plain", "differs", "cpu I", "batch", "4"),
        ("measured", "unet", "accumulated", "plain", "loss_last_to_plain", "differs", "cpu I", "batch", "4"),
    ]
    text = words(training_findings(pd.DataFrame(lines, columns=columns), "transparency_verdict"))
    assert "All 2 comparisons with the same micro-batches without a pipeline: exactly equal." in text
    assert "2 comparisons with the plain model on the whole batch: 1 equivalent within the margin, 1 different." in text
    assert "Different: last training loss. All of these runs normalise by the statistics of the micro-batch." in text


def test_a_race_names_the_engine_first_and_then_all():
    def row(contender, ratio, package, **changes):
        values = {"workload": "convnet", "baseline": "loop", "device": "cpu I", "profile": "mine", "ratio": ratio}
        return PeerRow(contender=contender, package=package, **{**values, **changes})

    rows = [
        *(row("engine", 1.5, "gpipe_bench"), row("engine", 1.7, "gpipe_bench"), row("peer", 1.2, "other")),
        row("gone", None, "other", status="skipped", reason="not installed"),
    ]
    (finding,) = race_findings(rows, "peers")
    assert finding.shown == 1
    assert finding.where == "cpu I (mine)"
    lead, everyone = map(plain, finding.sentences)
    assert lead.endswith("median of up to 2 settings: engine 1.6 x.")
    assert everyone.endswith("engine 1.6 x, peer 1.2 x.")


def test_failures_are_counted_by_cause():
    runs = [
        *(Run("simulated", "oom", f"device 0 needs {k} GiB") for k in (7, 8, 9)),
        *(Run("simulated", "ok", "") for _ in range(7)),
        *(Run("measured", "skipped", "not installed"), Run("measured", "error", "boom")),
        Run("published", "ok", ""),
    ]
    first, second = failure_findings(runs)
    assert (first.evidence, second.evidence) == (("simulated",), ("measured",))
    assert words([first]).startswith("3 of 10 rows have no value. 3 ran out of memory (oom): 3 x such as")
    assert re.search(r"1 failed \(error\): 1 x .boom.\. 1 skipped: 1 x .not installed.\.", words([second]))


def test_what_the_tables_do_not_have_is_left_out():
    assert findings_of(Contents()) == []
    assert findings_of(Contents(rows={"speed": [ablation_row("dep-str-ptl", throughput_samples_per_s=1.0)]})) == []


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.39, "+39 %"), (0.8, "-20 %"), (1.0, "0 %"), (1.00001, "0 %"), (1.049, "+4.9 %")]
)
def test_ratios_are_changes_in_percent(ratio, text):
    assert plain(percent(ratio)) == text


def test_nouns_have_their_number():
    assert [plural(count, "run") for count in (1, 2)] == ["1\u00a0run", "2\u00a0runs"]
