"""Advice: the fastest of what was tried and fits, and what other choices cost."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
import yaml

from gpipe_bench.cli import main
from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.profile import PROFILES, load_profile
from gpipe_bench.results.labels import run_as
from gpipe_bench.schedules import check, read_csv
from gpipe_bench.schedules.table import SCHEDULES, partition_count
from gpipe_bench.settings import CHECKPOINT_MODES
from gpipe_bench.suite.advice.advice import Advice, AdviceRequest, advise
from gpipe_bench.suite.advice.fit import Search, most_samples_per_s
from gpipe_bench.suite.running.simulated import simulate_cells
from gpipe_bench.suite.validation import validated
from tests.suite.cells_of import ok_result

SMALL = {"model_args": "depth=1;B=1;C=8;size=16", "devices": 2, "batch_size": 4}
ALONE = {**SMALL, "schedules": "none"}


@pytest.fixture(scope="module")
def advice():
    return advise(AdviceRequest.model_validate(ALONE))


def test_candidates_are_every_number_of_devices_and_chunks_in_every_mode():
    cells = AdviceRequest.model_validate({**SMALL, "devices": 3}).candidates()
    assert {cell.partitions for cell in cells} == {1, 2, 3}
    assert {cell.chunks for cell in cells} == {1, 2, 4}
    assert len(cells) == 3 * 3 * 3


def test_several_processes_advise_the_same(advice):
    done = []
    again = advise(AdviceRequest.model_validate(ALONE), lambda *progress: done.append(progress), processes=3)
    assert again.results == advice.results
    first = len(advice.request.candidates())
    assert done == [(number, first) for number in range(1, first + 1)]


def test_another_model_has_its_own_arguments():
    assert AdviceRequest.model_validate({"model": "amoebanet-d"}).model_args == ""


def test_the_best_is_the_fastest(advice):
    speeds = [result.row.throughput_samples_per_s for result in advice.results if result.row.status == "ok"]
    assert advice.best.row.throughput_samples_per_s == max(speeds)


def made(throughput, balance, busy, **values):
    """A simulation of ours: its throughput, and how busy each device was."""
    known = {
        "throughput_samples_per_s": throughput,
        "balance": balance,
        "partitions": len(busy),
        "device_count": len(busy),
        **values,
    }
    result = ok_result("dep-str-ptl", **known)
    devices = [{"compute_fraction": share, "recompute_fraction": 0.0, "peak_reserved_gib": 1.0} for share in busy]
    return replace(result, devices=devices)


@pytest.fixture(scope="module")
def scheduled():
    return advise(AdviceRequest.model_validate({**SMALL, "schedules": "all", "batch_size": 2}))


def test_schedules_are_searched_as_an_exhaustive_search_would(scheduled):
    request, found = scheduled.request, []
    assert request.schedules == SCHEDULES
    for name, p, m, mode in product((None, *SCHEDULES), (1, 2), (1, 2), CHECKPOINT_MODES):
        n = partition_count(name, p)
        found.append(request.cell(partitions=n, chunks=m, checkpoint=mode, schedule=name))
    speeds = [result.row.throughput_samples_per_s for result in simulate_cells(found, timelines=())]
    assert scheduled.best.row.throughput_samples_per_s >= max(speeds)


def test_every_schedule_is_tried_by_default():
    asked = AdviceRequest.model_validate(SMALL)
    assert asked.schedules == SCHEDULES
    assert AdviceRequest.model_validate({**SMALL, "schedules": "none"}).schedules == ()


def every_cell(request):
    """All balances of all schedules on all devices, with every number of chunks and mode."""
    for name in (None, *request.schedules):
        n = partition_count(name, request.devices)
        for cuts in combinations(range(1, request.layers), n - 1):
            balance = [after - before for before, after in pairwise((0, *cuts, request.layers))]
            for m, mode in product((1, 2, 4, 8, 16), CHECKPOINT_MODES):
                yield request.cell(partitions=n, chunks=m, checkpoint=mode, schedule=name, balance=balance)


EVEN = {"model": "vit", "model_args": "L=2;D=64;heads=2"}
HEAVY_HEAD = {
    "model": "gpt2",
    "model_args": "L=2;D=768;heads=12;vocabulary=50257;context=512;dropout=0",
    "precision": "bfloat16",
    "optimizer": "adamw",
}


@pytest.mark.parametrize(
    ("model", "share"),
    [
        (EVEN, None),
        (HEAVY_HEAD, 0.5),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(EVEN, 0.5), (EVEN, 0.7), (HEAVY_HEAD, None), (HEAVY_HEAD, 0.7)]
        ),
    ],
)
def test_no_balance_of_any_schedule_is_much_faster_with_a_limit_or_without(model, share):
    settings = {**model, "devices": 2, "batch_size": 16, "profile": "h100", "schedules": "1f1b,interleaved,zb_v"}
    request = AdviceRequest.model_validate(settings)
    hardware = load_profile("h100")
    whole = request.cell(partitions=2, chunks=1, checkpoint="never")
    (free,) = simulate_cells([whole], timelines=())
    # Each device holds two workspaces of cuBLAS, whatever the balance.
    least = 2 * hardware.cublas_workspace_mib / 1024
    most = max(record["peak_reserved_gib"] for record in free.devices)
    limit = 0.0 if share is None else least + share * (most - least)
    if limit:
        request = request.model_copy(update={"memory_limit_gib": limit})
        hardware = hardware.model_copy(update={"memory_gib": limit + hardware.context_gib})
    every = simulate_cells(every_cell(request), timelines=(), hardware=hardware)
    fastest = max(result.row.throughput_samples_per_s or 0.0 for result in every)
    assert fastest > 0, "something fits"
    found = advise(request)
    assert found.fastest >= 0.995 * fastest
    if limit:
        assert max(record["peak_reserved_gib"] for record in found.best.devices) <= limit


@pytest.mark.parametrize("seed", range(6))
def test_a_setting_is_skipped_only_if_no_balance_of_it_can_be_the_fastest(seed):
    """What is skipped depends on this bound; the best balance may be a fifth faster than the one by time."""
    drawn = random.Random(seed)
    model = drawn.choice([EVEN, HEAVY_HEAD, {"model": "vit", "model_args": "L=3;D=256;heads=4"}])
    request = AdviceRequest.model_validate({**model, "devices": 2, "batch_size": 16, "profile": "h100"})
    for name in drawn.sample([None, *SCHEDULES], 4):
        n, m, mode = partition_count(name, 2), drawn.choice([2, 4, 8, 16]), drawn.choice(CHECKPOINT_MODES)
        setting = {"partitions": n, "chunks": m, "checkpoint": mode, "schedule": name}
        cuts = combinations(range(1, request.layers), n - 1)
        balances = [[after - before for before, after in pairwise((0, *cut, request.layers))] for cut in cuts]
        cells = [request.cell(**setting), *(request.cell(**setting, balance=balance) for balance in balances)]
        start, *others = simulate_cells(cells, timelines=())
        assert max(result.row.throughput_samples_per_s for result in others) <= most_samples_per_s(start), (
            name,
            m,
            mode,
        )


def test_a_slow_setting_is_improved_where_its_devices_are_idle():
    """By time it is 15 % slower than the fastest so far; another balance of it is 5 % faster than that."""
    request = AdviceRequest.model_validate({**SMALL, "schedules": "none"})
    cell = request.cell(partitions=2, chunks=4, checkpoint="never", balance=[5, request.layers - 5])
    busy = {"recompute_fraction": 0.0, "peak_allocated_gib": 1.0, "peak_reserved_gib": 1.0}
    asked = []

    def simulated(one):
        asked.append(one.balance)
        speed, shares = (85.0, (0.5, 0.9)) if one.balance == cell.balance else (105.0, (0.8, 0.8))
        row = replace(ok_result().row, throughput_samples_per_s=speed, balance="-".join(map(str, one.balance)))
        return replace(ok_result(), row=row, devices=[{**busy, "compute_fraction": share} for share in shares])

    Search(10.0, simulated, simulated, effort=1000).improve([(cell, simulated(cell))], fastest=100.0)
    assert len({*asked}) > 1
    asked.clear()
    Search(10.0, simulated, simulated, effort=1000).improve([(cell, simulated(cell))], fastest=130.0)
    assert len({*asked}) == 1


def test_precision_and_optimizer_are_those_of_all_that_is_simulated():
    asked = {**SMALL, "schedules": "1f1b,zb_v", "precision": "bfloat16", "optimizer": "adamw", "profile": "h100"}
    found = advise(AdviceRequest.model_validate(asked))
    configurations = [json.loads(result.configuration) for result in found.results]
    assert {(one["precision"], one["optimizer"]) for one in configurations} == {("bfloat16", "adamw")}
    assert {one.get("schedule") for one in configurations} >= {"1f1b", "zb_v"}


def test_the_runner_up_has_another_schedule(scheduled):
    best, other = scheduled.best.row, scheduled.runner_up.row
    assert run_as(best) != run_as(other)
    assert other.throughput_samples_per_s <= best.throughput_samples_per_s
    assert f"schedule {run_as(other)}" in dict(scheduled.alternatives())


def test_a_schedule_is_chosen_where_the_paper_s_executor_does_not_fit():
    wide = {"model_args": "depth=3;B=1;C=32;size=128", "devices": 4, "batch_size": 64, "schedules": "zb_h1"}
    found = advise(AdviceRequest.model_validate({**wide, "memory_limit_gib": 0.8}))
    assert found.best.row.schedule == "zb_h1"
    assert max(device["peak_allocated_gib"] for device in found.best.devices) <= 0.8


def test_the_command_writes_the_schedule_of_the_best(tmp_path, capsys):
    out = tmp_path / "best.csv"
    words = [f"--{name.replace('_', '-')}={value}" for name, value in {**SMALL, "schedules": "1f1b,zb_v"}.items()]
    with pytest.raises(SystemExit) as ended:
        main(["advise", *words, "--schedule-csv", str(out)])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "the best with another schedule" in " ".join(said.split())
    check(read_csv(out.read_text()))


def test_of_equally_fast_ones_fewer_devices_are_best():
    results = [made(10.0, "5-5-5", (0.5,) * 3), made(10.0, "8-7", (0.5,) * 2), made(9.0, "15", (1.0,))]
    assert Advice(AdviceRequest(), 22.0, results).best.row.balance == "8-7"


def test_alternatives_are_the_best_of_their_kind_and_no_faster(advice):
    best = advice.best.row.throughput_samples_per_s
    names = [name for name, _ in advice.alternatives()]
    assert {name.split()[0] for name in names} >= {"checkpoint", "devices", "chunks"}
    assert all((result.row.throughput_samples_per_s or 0) <= best for _, result in advice.alternatives())


def test_less_memory_gives_other_advice_or_none(advice):
    most = max(record["peak_reserved_gib"] for record in advice.best.devices)
    tight = advise(AdviceRequest.model_validate({**ALONE, "memory_limit_gib": most * 0.7}))
    fullest = [max(d["peak_reserved_gib"] for d in r.devices) for r in tight.results if r.row.status == "ok"]
    assert all(gib <= most * 0.7 for gib in fullest)
    assert tight.best is None or tight.best.row.throughput_samples_per_s <= advice.best.row.throughput_samples_per_s


def test_a_limit_above_the_device_is_that_of_the_device(tmp_path):
    profile = yaml.safe_load((PROFILES / "p40.yaml").read_text())
    advice = advise(AdviceRequest.model_validate({**ALONE, "devices": 1, "memory_limit_gib": 1e6}))
    assert advice.limit_gib == pytest.approx(profile["memory_gib"] - profile["context_gib"])


def test_wrong_requests_are_named_at_once():
    wrong = {"model": "unit", "devices": 0, "profile": "p41", "memory_limit_gib": -1}
    with pytest.raises(ConfigError) as caught:
        validated(AdviceRequest, wrong, lambda path: f"--{path[0]}")
    assert len(caught.value.problems) == 4


def test_the_command_prints_the_recommendation_and_writes_table_and_figure(tmp_path, capsys):
    words = ["--model-args", SMALL["model_args"], "--devices", "2", "--batch-size", "4", "--schedules", "1f1b"]
    files = ["--rows", str(tmp_path / "advice.csv"), "--figure", str(tmp_path / "advice")]
    with pytest.raises(SystemExit) as ended:
        main(["advise", *words, *files])
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"recommended: (1 device|2 devices), balance ", printed)
    assert "unet (depth=1;B=1;C=8;size=16;in=3;out=1;dropout=0.1), batch 4" in printed
    assert "published" not in printed
    assert "samples/s simulated" in printed
    assert all((tmp_path / f"advice.{suffix}").stat().st_size for suffix in ("csv", "svg", "pdf", "png"))


def test_a_recommendation_that_is_bound_by_the_host_says_so(capsys):
    words = ["--model-args", SMALL["model_args"], "--devices", "1", "--batch-size", "2", "--profile", "h100"]
    with pytest.raises(SystemExit):
        main(["advise", *words])
    assert "bound by the host: its launches take longer" in capsys.readouterr().out


def printed_advice(monkeypatch, capsys, advice, *options):
    monkeypatch.setattr("gpipe_bench.suite.advice.advice.advise", lambda *_: advice)
    with pytest.raises(SystemExit):
        main(["advise", *options])
    return capsys.readouterr().out.splitlines()


def wide_advice():
    """Sixty-four devices, everything that can be said of them, and many choices."""
    uses = (0.5,) * 64
    balance = "-".join(["12"] * 64)
    best = made(1234567.8, balance, uses, schedule="interleaved_zb", backward="scheduled", chunks=128)
    best = replace(best, bound_by_host=True, caveats=["a long word of caution " * 8] * 3)
    others = [
        made(1000000.0 + m, balance.replace("12-12", f"{m}-12", 1), uses, chunks=m, checkpoint=mode)
        for m, mode in product(range(1, 40), CHECKPOINT_MODES)
    ]
    request = AdviceRequest(devices=64, hosts=8, memory_limit_gib=1000, profile="h100")
    return Advice(request, 78.6, [*others, best], ideal_samples_per_s=2e6)


def test_the_answer_is_a_screen_and_all_of_it_an_option(monkeypatch, capsys):
    advice = wide_advice()
    given = ("--devices", "64", "--hosts", "8", "--memory-limit-gib", "1000", "--profile", "h100")
    lines = printed_advice(monkeypatch, capsys, advice, *given)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    every = printed_advice(monkeypatch, capsys, advice, *given, "--all")
    table = every[next(place for place, line in enumerate(every) if line.startswith("recommended  ")) + 1 :]
    assert len(table) == len(advice.alternatives())
    shown = int(lines[-1].split()[0])
    assert shown + len(lines) - 2 - next(i for i, line in enumerate(lines) if line.startswith("recommended  ")) == len(
        table
    )


def test_the_answer_says_the_error_of_such_numbers(monkeypatch, capsys):
    known = "samples/s -10% to +3% in 56 known runs, mean 2%; GiB -2% to +3% in 13 known runs, mean 1%"
    none = "samples/s and GiB never compared with a run"
    for profile, said in (("a100", known), ("p100", none)):
        advice = Advice(AdviceRequest(profile=profile), 20.0, [made(10.0, "8-7", (0.5,) * 2)])
        lines = printed_advice(monkeypatch, capsys, advice, "--profile", profile)
        assert f"error on {profile}: {said}" in " ".join(map(str.strip, lines))


def test_nothing_fits_is_exit_status_1(capsys):
    words = ["--model-args", SMALL["model_args"], "--devices", "1", "--batch-size", "2", "--schedules", "none"]
    with pytest.raises(SystemExit) as ended:
        main(["advise", *words, "--memory-limit-gib", "1e-9"])
    assert ended.value.code == 1
    assert "nothing fits the memory" in capsys.readouterr().out


def test_a_limit_above_the_device_is_said(capsys):
    words = ["--model-args", SMALL["model_args"], "--devices", "1", "--batch-size", "2"]
    for limit, said in (("1000", True), ("20", False)):
        with pytest.raises(SystemExit):
            main(["advise", *words, "--memory-limit-gib", limit])
        printed = " ".join(capsys.readouterr().out.split())
        assert (f"--memory-limit-gib {limit} is more than a p40 has for tensors: 22.0 GiB hold" in printed) == said


def test_too_many_devices_are_refused_in_plain_words(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["advise", "--devices", "1000"])
    assert ended.value.code == 2
    assert "--devices must be at most 64, got 1000; lower it" in capsys.readouterr().err


def test_a_figure_needs_rows(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["advise", "--figure", "x"])
    assert ended.value.code == 2
    assert "--rows" in capsys.readouterr().err
