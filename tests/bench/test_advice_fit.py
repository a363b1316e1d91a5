"""Balances that fit a memory which the balance by time breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpipe_bench.bench.advice.advice import AdviceRequest, advise
from gpipe_bench.bench.advice.fit import Fitter, needed_gib, worth_fitting
from tests.bench.cells_of import ok_result

REQUEST = AdviceRequest(model="unet", devices=3, batch_size=16)
TIMES = [1.0] * 12
GIB = [4.0, 4.0, 4.0, *[1.0] * 9]


def made(cell, limit=float("inf"), balance=(4, 4, 4)):
    """A chain of layers that take as long as each other, the first of which hold most of the memory."""
    sizes, start, needs, busy = cell.balance or balance, 0, [], []
    for size in sizes:
        needs.append(sum(GIB[start : start + size]))
        busy.append(sum(TIMES[start : start + size]))
        start += size
    known = {"partitions": len(sizes), "chunks": cell.chunks, "checkpoint": cell.checkpoint}
    known["balance"] = "-".join(map(str, sizes))
    if max(needs) > limit:
        result = ok_result("dep-str-ptl", **known, throughput_samples_per_s=None)
        return replace(result, row=replace(result.row, status="oom", reason="full"), devices=[], needed_gib=max(needs))
    result = ok_result("dep-str-ptl", **known, throughput_samples_per_s=100 / max(busy))
    keys = ("peak_allocated_gib", "peak_reserved_gib", "compute_fraction")
    uses = [dict(zip(keys, (need, need, t / 12), strict=True)) for need, t in zip(needs, busy, strict=True)]
    return replace(result, devices=[{**use, "recompute_fraction": 0.0} for use in uses])


@pytest.fixture
def fitter():
    kept, probed = [], []

    def simulate(cell):
        kept.append(made(cell, 10.0))
        return kept[-1]

    def probe(cell):
        probed.append(cell)
        return made(cell)

    return Fitter(10.0, simulate, probe), kept, probed


def cell(**values):
    return REQUEST.cell(**{"partitions": 3, "chunks": 4, "checkpoint": "always", **values})


def test_layers_leave_the_fullest_partition_until_all_fit(fitter):
    own, kept, probed = fitter
    own.fit_all([(cell(), made(cell(), 10.0))])
    fits = [result.row for result in kept if result.row.status == "ok"]
    # 12-3-... GiB: no first partition of three layers or more fits, and five layers are the fewest of the slowest.
    assert max(row.throughput_samples_per_s for row in fits) == pytest.approx(100 / 5)
    assert len(probed) <= 32


def test_what_fits_already_is_left_alone(fitter):
    own, kept, probed = fitter
    own.fit_all([(cell(), made(cell()))])
    assert not kept
    assert not probed


def test_what_no_balance_fits_ends(fitter):
    own, kept, probed = fitter
    own.limit_gib = 3.0
    own.fit(cell())
    assert not kept
    assert len(probed) <= 16


def test_more_than_all_devices_have_is_not_tried():
    alone = cell(partitions=1)
    candidates = [(alone, made(alone, 6.0, (12,))), (cell(), made(cell(), 6.0))]
    assert needed_gib(candidates[0][1]) == 21.0
    assert worth_fitting(candidates, 6.9) == []
    assert worth_fitting(candidates, 7.1) == [cell()]


def test_chunks_beyond_slower_ones_that_fit_are_not_tried():
    def fits(chunks, speed):
        result = made(cell(chunks=chunks))
        row = replace(result.row, throughput_samples_per_s=speed)
        return cell(chunks=chunks), replace(result, row=row)

    few = (cell(chunks=2), made(cell(chunks=2), 10.0))
    assert worth_fitting([few, fits(4, 9.0), fits(8, 10.0)], 10.0) == []
    assert worth_fitting([few, fits(4, 10.0), fits(8, 9.0)], 10.0) == [few[0]]


def test_the_advice_uses_all_devices_where_another_balance_fits(monkeypatch):
    def simulate_cells(cells, _report=None, *, hardware, **_):
        limit = hardware.memory_gib - hardware.context_gib
        return [made(each, limit, [12 // each.partitions] * each.partitions) for each in cells]

    monkeypatch.setattr("gpipe_bench.bench.running.simulated.simulate_cells", simulate_cells)
    advice = advise(REQUEST.model_copy(update={"batch_size": 1, "memory_limit_gib": 10.0}))
    assert advice.best.row.balance == "2-5-5"
    assert max(use["peak_allocated_gib"] for use in advice.best.devices) <= 10.0
    modes = {result.row.checkpoint for result in advice.results if result.row.balance == "2-5-5"}
    assert modes == {"always", "except_last", "never"}, "what another mode costs is said of the balance that fits"
