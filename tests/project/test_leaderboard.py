"""The leaderboard shows the fastest setting of each network by its median, and mixes no settings."""

from __future__ import annotations

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.suite.evaluation.collect import write_tables
from scripts.leaderboard import CSV, HEADER, leaders, leaders_csv, shown
from tests.project.tree import ROOT
from tests.suite.cells_of import ok_result

MACHINE, NETWORK, DEVICES, PARTITIONS, RUN, BATCH, CHUNKS, SPEED, REPEATS, TORCH, ROWS = range(len(HEADER))


def lines_of(folder, *results):
    write_tables(results, "ablation", folder / "box" / "ablation.csv")
    return leaders(folder)


def test_the_fastest_setting_by_its_median_is_shown(tmp_path):
    slow = [ok_result("baseline", repeat, speed) for repeat, speed in enumerate((9.0, 10.0, 99.0))]
    fast = [ok_result("dep-x-ptl", repeat, speed) for repeat, speed in enumerate((11.0, 12.0, 13.0))]
    (line,) = lines_of(tmp_path, *slow, *fast)
    assert line == [
        *("box", "unet depth=2 B=1 C=4 size=16", "1", "2", "paper's executor dep-x-ptl, except_last", "4", "2"),
        *("12.0", "3", "2.13.0", "results/reference/measured/box/ablation.csv"),
    ]


def test_runs_that_failed_do_not_count(tmp_path):
    values = {"throughput_samples_per_s": None, "step_time_ms": None, "status": "oom", "reason": "memory"}
    (line,) = lines_of(tmp_path, ok_result("baseline", 0, 5.0), ok_result("dep-x-ptl", 0, 50.0, **values))
    assert (line[SPEED], line[REPEATS]) == ("5.0", "1")


def test_every_machine_of_the_reference_results_has_lines():
    lines = leaders()
    assert {line[MACHINE] for line in lines} == {path.name for path in (REFERENCE_FOLDER / "measured").iterdir()}
    assert len({tuple(line) for line in lines}) == len(lines)
    places = [tuple(line[: PARTITIONS + 1]) for line in lines]
    assert len(set(places)) == len(places), "a network is listed twice on one machine"
    (h100,) = [line for line in lines if line[MACHINE].startswith("1x-nvidia-h100") and "size=192" in line[NETWORK]]
    assert "dep-str-ptl" in h100[RUN]
    assert h100[REPEATS] == "2"


def test_loops_and_tiny_networks_of_the_race_are_left_out():
    names = {line[RUN] for line in leaders() if line[ROWS].endswith("peers.csv")}
    assert not [name for name in names if name.startswith(("plain", "loop"))]
    assert not [line for line in leaders() if line[NETWORK].startswith("tiny")]


def test_the_page_shows_the_fastest_of_a_network_whatever_its_partitions():
    def line(network, partitions, speed):
        found = ["box", network, "1", partitions, "1f1b", "32", "8", speed, "3", "2.13.0", "results/box/peers.csv"]
        assert len(found) == len(HEADER)
        return found

    lines = [line("unet", "2", "9.5"), line("unet", "4", "10.0"), line("gpt2", "2", "3.0")]
    assert shown(lines) == [
        ["[box](../results/box/peers.csv)", "unet", "4", "1f1b", "32 / 8", "10.0", "3"],
        ["[box](../results/box/peers.csv)", "gpt2", "2", "1f1b", "32 / 8", "3.0", "3"],
    ]


def test_the_file_has_every_line():
    assert (ROOT / CSV).read_text(encoding="utf-8") == leaders_csv(), "run: make tables"
    assert leaders_csv().count("\n") == len(leaders()) + 1
