"""From outcomes to rows: pairing by round, baselines, verdicts, limits."""

from __future__ import annotations

import csv

import pytest

from gpipe_bench.bench.datapackage.check import check_folder
from gpipe_bench.bench.datapackage.descriptor import write_descriptor
from gpipe_bench.bench.datapackage.take import take_reference
from gpipe_bench.bench.peers.tables import peer_rows, ratio_records, step_records, write_race
from gpipe_bench.results.catalogue import reference_figures
from gpipe_bench.results.peer_rows import RATIO_COLUMNS, STEP_COLUMNS, PeerRow
from tests.peers.cases_of import outcome, raced, tiny_cells, tiny_unet

# The machine gets slower by half from round to round; the ratio stays.
SLOWING = [1.0, 1.5, 2.25, 3.4]


def rows_of(*races, tolerance=1e-4):
    return {(row.workload, row.contender): row for row in peer_rows(races, {}, tolerance)}


def cells_race(**values):
    case = tiny_cells()
    return raced(
        case,
        [
            outcome(case, "engine-scheduled", [0.5 * s for s in SLOWING], **values),
            outcome(case, "torchgpipe", SLOWING),
            outcome(case, "loop", [0.1 * s for s in SLOWING]),
        ],
    )


def unet_race(**values):
    case = tiny_unet()
    fast = outcome(case, "engine-scheduled", [0.6 * s for s in SLOWING], **values)
    others = {"pipelining-gpipe": 0.8, "loop": 1.0, "loop-processes": 0.55}
    return raced(
        case,
        [fast, *(outcome(case, name, [share * s for s in SLOWING]) for name, share in others.items())],
        alone=[[0.1, 0.2], [0.2, 0.2]],
        one_way_s=[0.01],
    )


def test_a_drift_of_the_machine_does_not_widen_a_ratio():
    row = rows_of(cells_race())["cells", "engine-scheduled"]
    assert (row.baseline, row.ratio, row.ratio_low, row.ratio_high) == ("torchgpipe", 0.5, 0.5, 0.5)


def test_networks_are_held_to_the_plain_loop_in_throughput():
    row = rows_of(unet_race())["unet", "engine-scheduled"]
    assert row.baseline == "loop"
    assert row.ratio == pytest.approx(1 / 0.6)
    assert row.throughput_samples_per_s == pytest.approx(8 / row.step_time_ms * 1e3)
    assert row.host_time_per_cell_us is None


def test_host_time_is_that_of_a_cell():
    row = rows_of(cells_race())["cells", "torchgpipe"]
    assert row.host_time_per_cell_us == pytest.approx(1e3 * row.step_time_ms / 8)


def test_without_the_baseline_there_is_no_ratio():
    case = tiny_cells()
    absent = outcome(case, "torchgpipe", [], status="skipped", reason="not installed")
    rows = rows_of(raced(case, [outcome(case, "engine-scheduled", [1.0]), absent]))
    assert rows["cells", "engine-scheduled"].ratio is None
    assert (rows["cells", "torchgpipe"].status, rows["cells", "torchgpipe"].reason) == ("skipped", "not installed")
    assert rows["cells", "torchgpipe"].step_time_ms is None


def test_one_round_has_no_interval():
    case = tiny_cells()
    row = rows_of(raced(case, [outcome(case, "torchgpipe", [1.0])]))["cells", "torchgpipe"]
    assert (row.ratio, row.ratio_low, row.ratio_high) == (1.0, None, None)


@pytest.mark.parametrize(("difference", "verdict"), [(1e-6, "equal"), (1e-3, "differ")])
def test_the_verdict_on_gradients(difference, verdict):
    row = rows_of(cells_race(gradient_difference=difference))["cells", "engine-scheduled"]
    assert (row.gradients, row.gradient_tolerance) == (verdict, 1e-4)


def test_gradients_that_are_no_numbers_differ():
    row = rows_of(cells_race(gradient_difference=float("inf")))["cells", "engine-scheduled"]
    assert (row.gradients, row.gradient_difference) == ("differ", None)


def test_no_gradients_no_verdict():
    assert rows_of(cells_race())["cells", "engine-scheduled"].gradients == ""


def test_the_parts_sum_to_the_gap():
    row = rows_of(cells_race(), unet_race())["unet", "pipelining-gpipe"]
    parts = [row.gap_imbalance_ms, row.gap_contention_ms, row.gap_copies_ms, row.gap_other_ms]
    assert row.gap_host_ms is None, "it did not take part in the cells"
    assert sum(parts) == pytest.approx(row.gap_ms)
    assert row.limit_ms == pytest.approx(rows_of(unet_race())["unet", "loop"].step_time_ms * 5 / 8)
    assert row.limit_samples_per_s == pytest.approx(8 / row.limit_ms * 1e3)


def test_cores_that_are_slower_together_make_the_limit_longer_by_as_much():
    """Two loops, each over half the micro-batches, take 0.55 of the whole loop's time: each core is a tenth slower."""
    rows = rows_of(unet_race())
    for name in ("engine-scheduled", "pipelining-gpipe"):
        assert rows["unet", name].gap_contention_ms == pytest.approx(0.1 * rows["unet", name].limit_ms)
    assert rows["unet", "loop-processes"].gap_contention_ms is None, "it is no pipeline"
    assert rows["unet", "loop-processes"].processes == 2
    odd = unet_race()
    odd.case = tiny_unet(chunks=3)  # one of the loops has two of three
    row = rows_of(odd)["unet", "engine-scheduled"]
    assert row.gap_contention_ms == pytest.approx((0.55 * 3 / 2 - 1) * row.limit_ms)
    odd.outcomes.pop()
    assert rows_of(odd)["unet", "engine-scheduled"].gap_contention_ms is None


def test_host_time_comes_from_cells_of_the_same_shape():
    row = rows_of(cells_race(), unet_race())["unet", "engine-scheduled"]
    cells = rows_of(cells_race())
    wanted = cells["cells", "engine-scheduled"].step_time_ms - cells["cells", "loop"].step_time_ms
    assert row.gap_host_ms == pytest.approx(wanted)
    other = raced(tiny_unet(chunks=8), unet_race().outcomes, alone=unet_race().alone)
    assert rows_of(cells_race(), other)["unet", "engine-scheduled"].gap_host_ms is not None
    elsewhere = cells_race()
    elsewhere.case = tiny_cells(checkpoint="never")
    assert rows_of(elsewhere, unet_race())["unet", "engine-scheduled"].gap_host_ms is None


def test_threads_of_one_process_copy_nothing_and_processes_every_microbatch():
    rows = rows_of(unet_race())
    assert rows["unet", "engine-scheduled"].gap_copies_ms == 0.0
    assert rows["unet", "pipelining-gpipe"].gap_copies_ms == pytest.approx(1e3 * 2 * 4 * 0.01 / 2)


def test_the_plain_module_has_a_limit_but_no_split():
    row = rows_of(unet_race())["unet", "loop"]
    assert row.limit_ms is not None
    assert row.gap_other_ms is None


def test_pairs_of_all_contenders_and_baselines():
    records = ratio_records([cells_race()])
    pairs = {(record["contender"], record["baseline"]): record["time_ratio"] for record in records}
    assert pairs["engine-scheduled", "loop"] == pytest.approx(5.0)
    assert pairs["loop", "torchgpipe"] == pytest.approx(0.1)
    assert len(pairs) == 6


def test_every_step_is_kept():
    records = step_records([cells_race()])
    assert len(records) == 3 * len(SLOWING)
    assert all(set(record) == set(STEP_COLUMNS) for record in records)


def test_a_race_can_be_taken_into_the_reference_results(tmp_path):
    facts = {"profile": "2x-some-cpu", "device": "cpu Some CPU"}
    facts |= {"commit": "c" * 40, "torch": "2.13.0", "python": "3.11.7"}
    write_race([cells_race(), unet_race()], facts, 1e-4, tmp_path / "peers.csv", '{"seed": 0}')
    take_reference(tmp_path / "peers.csv", tmp_path / "reference")
    write_descriptor(tmp_path / "reference")
    assert check_folder(tmp_path / "reference") == []
    taken = sorted(path.name for path in (tmp_path / "reference" / "measured" / "2x-some-cpu").iterdir())
    assert taken == ["peers.csv", "peers_configurations.csv", "peers_ratios.csv", "peers_steps.csv"]
    assert [figure.name for figure in reference_figures(tmp_path / "reference")] == ["peers"]


def test_tables_have_the_columns_of_the_schema(tmp_path):
    write_race([cells_race(), unet_race()], {}, 1e-4, tmp_path / "peers.csv", "{}")
    for name, columns in (("", PeerRow.columns()), ("_steps", STEP_COLUMNS), ("_ratios", RATIO_COLUMNS)):
        with (tmp_path / f"peers{name}.csv").open(newline="") as file:
            assert tuple(csv.DictReader(file).fieldnames) == tuple(columns)
