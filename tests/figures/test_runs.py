import pytest

from gpipe_bench.components import Components
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.runs import choose_run
from gpipe_bench.figures.tables import RecordedEvent
from tests.figures.synthetic import ablation_row, step_events


def recorded(variant, repeat=0, cell="cell", evidence="measured", m=2):
    return [RecordedEvent(cell, variant, repeat, evidence, event) for event in step_events(m, 2, copies=False)]


def test_the_repeat_nearest_to_the_median_is_drawn():
    rows = [ablation_row("baseline", k, step_time_ms=ms) for k, ms in enumerate([90.0, 10.0, 50.0])]
    events = [event for k in range(3) for event in recorded("baseline", k, m=k + 1)]
    run = choose_run(events, rows, "baseline")
    assert run.row.repeat == 2
    assert {event.microbatch for event in run.events} == {0, 1, 2}
    assert run.remark == ""


def test_only_repeats_with_events_are_considered():
    rows = [ablation_row("baseline", k, step_time_ms=ms) for k, ms in enumerate([90.0, 10.0, 50.0])]
    assert choose_run(recorded("baseline", 1), rows, "baseline").row.repeat == 1


def test_the_row_of_the_cell_is_told_from_others_by_its_name():
    rows = [
        ablation_row("baseline", chunks=2, cell="testnet-11111111"),
        ablation_row("baseline", chunks=4, cell="testnet-22222222"),
    ]
    assert choose_run(recorded("baseline", cell="testnet-22222222"), rows, "baseline").row.chunks == 4


def test_a_variant_that_is_unsupported_says_so():
    row = ablation_row(
        "dep-str-ptl", status="unsupported", reason="copy_streams needs an accelerator; see", device="cpu"
    )
    run = choose_run(recorded("dep-x-ptl"), [row, ablation_row("dep-x-ptl")], "dep-str-ptl")
    assert run.events == []
    assert run.remark == "no timeline, unsupported: copy_streams needs an accelerator"


def test_a_run_out_of_memory_says_so():
    run = choose_run(recorded("dep-x-x"), [ablation_row("baseline", status="oom", reason="needed 9 GiB")], "baseline")
    assert (run.events, run.remark) == ([], "no timeline, oom: needed 9 GiB")


def test_a_name_that_is_no_label_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="got 'dep-str-plt'; use 'dep-str-ptl'"):
        choose_run(recorded("dep-str-ptl"), [ablation_row("dep-str-ptl")], "dep-str-plt")


@pytest.mark.parametrize("name", ["nope", "dep-x-ptl-x-x"])
def test_of_many_labels_an_error_names_the_nearest(name):
    labels = [components.label for components in Components.factorial() if components.label != name]
    with pytest.raises(ConfigError) as caught:
        choose_run([], [ablation_row(label) for label in labels], name)
    assert len(str(caught.value)) <= 3 * 80


def test_a_label_that_was_not_recorded_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"must be one that was recorded, got 'dep-str-ptl'.*use 'dep-str-x'"):
        choose_run(recorded("dep-str-x"), [ablation_row("dep-str-x")], "dep-str-ptl")


def test_runs_of_another_evidence_are_never_shown():
    rows = [ablation_row("baseline", evidence="simulated"), ablation_row("baseline")]
    events = [*recorded("baseline", evidence="simulated", m=3, cell="simulated-cell"), *recorded("baseline")]
    assert len(choose_run(events, rows, "baseline").events) == len(step_events(2, 2, copies=False))
    assert len(choose_run(events, rows, "baseline", "simulated").events) == len(step_events(3, 2, copies=False))


def test_evidence_that_the_rows_lack_is_refused():
    with pytest.raises(ConfigError, match="evidence must be of a kind that the rows have, got 'simulated'; use one of"):
        choose_run(recorded("baseline"), [ablation_row("baseline")], "baseline", "simulated")


def test_events_without_their_row_are_refused():
    with pytest.raises(ConfigError, match=r"rows must hold the run of cell 'cell' \(measured, baseline\), got none"):
        choose_run(recorded("baseline"), [ablation_row("baseline", 1)], "baseline")
