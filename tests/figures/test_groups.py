from gpipe_bench.figures.groups import failure_notes, ordered_groups, setting_words, short_reason
from gpipe_bench.results.outcomes import group_rows
from tests.figures.synthetic import ablation_row, accelerator_ablation, cpu_ablation, published_ablation


def test_groups_come_published_simulated_measured():
    rows = [*cpu_ablation(), *accelerator_ablation(1, "simulated"), *published_ablation()]
    assert [group.head.evidence for group in ordered_groups(rows)] == ["published", "simulated", "measured"]


def test_runs_of_different_settings_are_never_compared():
    others = [{"chunks": 4}, {"device": "cpu Other"}, {"schedule": "1f1b"}]
    rows = [ablation_row("baseline", **values) for values in ({}, *others)]
    assert len(group_rows(rows)) == 4


def test_a_failed_run_that_did_not_learn_its_machine_joins_its_setting():
    rows = [
        ablation_row("baseline"),
        ablation_row("dep-str-x", status="unsupported", reason="no", device="cpu", profile=""),
    ]
    (group,) = group_rows(rows)
    assert set(group.outcomes) == {"baseline", "dep-str-x"}
    assert group.head.device == "cpu Imaginary 9000"


def test_a_failed_run_joins_the_machine_that_it_names_and_no_other_type_of_device():
    rows = [ablation_row("baseline"), ablation_row("baseline", device="cpu Other")]
    failed = {"status": "error", "reason": "no"}
    rows += [ablation_row("dep-x-x", **failed), ablation_row("dep-x-ptl", device="cuda", profile="", **failed)]
    assert [list(group.outcomes) for group in group_rows(rows)] == [
        ["baseline", "dep-x-x"],
        ["baseline"],
        ["dep-x-ptl"],
    ]


def test_failed_runs_alone_make_a_group():
    (group,) = group_rows([ablation_row(v, status="oom", reason="no") for v in ("baseline", "dep-x-x")])
    assert len(group.outcomes) == 2
    assert group.repeats == (0, 0)


def test_columns_are_ranked_by_median_and_failures_come_last():
    speeds = {"baseline": [10, 11, 99], "dep-x-x": [20, 21, 22], "dep-x-ptl": [12, 13, 14]}
    rows = [
        ablation_row(variant, k, throughput_samples_per_s=float(speed))
        for variant, values in speeds.items()
        for k, speed in enumerate(values)
    ]
    rows += [
        ablation_row("x-str-x", status="oom", reason="no"),
        ablation_row("dep-str-x", status="unsupported", reason="no"),
    ]
    (group,) = group_rows(rows)
    ranked = [outcome.variant for outcome in group.ranked()]
    assert ranked == ["dep-x-x", "dep-x-ptl", "baseline", "dep-str-x", "x-str-x"]


def test_memory_is_what_all_runs_have():
    reserved = {"peak_allocated_gib": 1.0, "peak_reserved_gib": 2.0}
    (both,) = group_rows([ablation_row("baseline", **reserved)])
    (one,) = group_rows([ablation_row("baseline", **reserved), ablation_row("dep-x-x", peak_allocated_gib=1.0)])
    assert (both.memory_column, one.memory_column) == ("peak_reserved_gib", "peak_allocated_gib")


def test_small_memory_is_shown_in_mib():
    (small,) = group_rows([ablation_row("baseline", peak_allocated_gib=0.03)])
    (large,) = group_rows([ablation_row("baseline", peak_allocated_gib=3.0)])
    assert (small.memory_scale, large.memory_scale) == ((1024.0, "MiB"), (1.0, "GiB"))


def test_notes_say_what_failed_how_often_and_why():
    (group,) = group_rows(cpu_ablation())
    assert failure_notes(list(group.outcomes.values())) == [
        "\u00d7 unsupported, 16 variants: copy_streams needs an accelerator",
        "\u25bc oom, x-x-ptl-x-x: needed 3.1 GiB of 2.0 GiB",
        "\u2716 error, dep-x-x-x-x (1 of 3 repeats): RuntimeError: worker of partition 2 died",
    ]


def test_reasons_that_differ_in_numbers_are_one_note():
    rows = [
        ablation_row("baseline", status="oom", reason="needed 3.1 GiB"),
        ablation_row("baseline", 1, status="oom", reason="needed 3.2 GiB"),
        ablation_row("dep-x-x", status="oom", reason="needed 5 GiB"),
    ]
    (group,) = group_rows(rows)
    assert failure_notes(list(group.outcomes.values())) == ["\u25bc oom, baseline and dep-x-x: needed 3.1 GiB"]


def test_a_long_reason_is_cut_visibly():
    short = short_reason("word " * 40)
    assert len(short) <= 90
    assert short.endswith("…")


def test_setting_is_told_in_words():
    words = setting_words(ablation_row("baseline", device="cuda H9", device_count=2, transfer="host"))
    assert words.replace("\u00a0", " ").replace("\u00d7", "x") == (
        "depth=5, B=1, C=8, size=64; 2 x cuda H9; "
        "4 partitions, 8 chunks, batch 32, checkpoint except_last, transfer host"
    )
    words = setting_words(ablation_row("baseline", backward="scheduled", schedule="zb_h1"))
    assert words.replace("\u00a0", " ").endswith("checkpoint except_last, schedule zb_h1")
