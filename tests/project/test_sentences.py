"""Sentences of docs/residuals.md, docs/claims.md and docs/schedules_compared.md say what the committed rows hold."""

from __future__ import annotations

import csv

import pytest

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.results.shapley import shapley_shares
from tests.project.pages import PAGES

SHARED, OWN = "dep-str-ptl", "dep-str-ptl-clk-rec-x"
COMPONENTS = ("clock_cycle", "fork_join", "copy_streams", "portals", "early_recompute", "shared")


def rows_of(table: str) -> list[dict[str, str]]:
    with (REFERENCE_FOLDER / f"{table}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def words_of(page: str) -> str:
    return " ".join(PAGES[f"docs/{page}.md"].split())


def speed(row: dict[str, str]) -> float:
    return float(row["throughput_samples_per_s"] or "nan")


class Residuals:
    """Throughput of a schedule with residuals whose mixes are recomputed, or of the plain decoder."""

    def __init__(self, profile: str) -> None:
        self.rows = {
            (row["schedule"], row["hosts"], row["variant"], row["model"] == "decoder"): row
            for row in rows_of(f"simulated/{profile}/residuals")
            if not row["model_args"].endswith("recompute=false")
        }

    def gain(self, schedule: str, over: str = "1f1b", hosts: str = "1", *, plain: bool = False) -> float:
        own, other = (self.rows[name, hosts, SHARED, plain] for name in (schedule, over))
        return speed(own) / speed(other) - 1

    def cost(self) -> float:
        return 1 - speed(self.rows["1f1b", "1", SHARED, False]) / speed(self.rows["1f1b", "1", SHARED, True])

    def sharing(self, schedule: str, hosts: str) -> float:
        shared, own = (speed(self.rows[schedule, hosts, variant, False]) for variant in (SHARED, OWN))
        return shared / own - 1

    def fastest(self, hosts: str, *, plain: bool) -> str:
        known = {key[0]: speed(row) for key, row in self.rows.items() if key[1:] == (hosts, SHARED, plain)}
        return max((name for name in known if known[name] > 0), key=lambda name: known[name])


def test_what_residuals_cost_and_which_schedule_is_best():
    h100, a100, words = Residuals("h100"), Residuals("a100"), words_of("residuals").replace(" %", "%")
    assert f"{h100.cost():.0%} of 1F1B's throughput** on H100s, and {a100.cost():.0%} on A100s" in words
    waits = [float(h100.rows["1f1b", hosts, SHARED, False]["copy_fraction"]) for hosts in ("1", "4")]
    assert "is {:.1%} of the step of 1F1B on one host, {:.1%} on four".format(*waits) in words
    one, *four = (h100.sharing(*place) for place in (("1f1b", "1"), ("1f1b", "4"), ("zb_h1", "4"), ("zb_v", "4")))
    said = "they make 1F1B {:.0%} faster; on four hosts {:.0%}, `zb_h1` {:.0%} and `zb_v` {:.0%}."
    assert said.format(one, *four) in words
    gains = (h100.gain("zb_h1", plain=plain) for plain in (False, True))
    assert "{:.1%} over 1F1B, of {:.1%} without residuals".format(*gains) in words
    best = [(hosts, h100.fastest(hosts, plain=False)) for hosts in ("1", "4")]
    gains = (h100.gain(name, hosts=hosts) for hosts, name in best)
    said = (
        "With them it is `dualpipe_v` on one host, {:.0%} over 1F1B in about the same memory, and `interleaved` on four"
    )
    assert (said + " hosts, {:.0%} over 1F1B").format(*gains) in words
    assert [name for _, name in best] == ["dualpipe_v", "interleaved"]
    assert {h100.fastest(hosts, plain=True) for hosts in ("1", "4")} == {"zb_h2"}
    gains = (h100.gain("v_half", plain=True), -h100.gain("v_half"))
    assert "It is {:.0%} faster than 1F1B without residuals and {:.0%} slower with them".format(*gains) in words


def test_what_components_are_worth_to_residuals():
    rows = {}
    for row in rows_of("simulated/h100/residuals_components"):
        # A label has its sixth slot only where `shared` is off.
        on = {**row, "shared": str(row["variant"].count("-") < 5)}
        rows[frozenset(name for name in COMPONENTS if on[name] == "True")] = row
    assert len(rows) == 64
    speeds = shapley_shares(COMPONENTS, lambda chosen: speed(rows[chosen]))
    memory = shapley_shares(COMPONENTS, lambda chosen: float(rows[chosen]["peak_reserved_gib"]))
    words = words_of("residuals")
    said = f"`shared` is worth {speeds['shared'].value:.1f} samples/s and {-memory['shared'].value:.0f} GiB of reserved"
    assert said in words
    assert f"`portals` cost {-speeds['portals'].value:.1f} samples/s" in words


def difference(simulated: str, emulated: str) -> float:
    """The largest difference of a simulated throughput from the emulated one of the same setting."""
    setting = (
        "model_args",
        "variant",
        "schedule",
        "chunks",
        "checkpoint",
        "steps_overlap",
        "precision",
        "device_count",
    )
    known = {tuple(row[name] for name in setting): speed(row) for row in rows_of(simulated)}
    return max(abs(known[tuple(row[name] for name in setting)] / speed(row) - 1) for row in rows_of(emulated))


def test_emulated_throughputs_are_close_to_simulated_ones():
    assert difference("simulated/h100/residuals_float32", "emulated/h100/residuals_float32") < 1e-3
    assert "gives these throughputs to 0.1 %" in words_of("residuals")
    most = max(difference(f"simulated/{name}/schedules", f"emulated/{name}/schedules") for name in ("h100", "p40"))
    assert f"Emulated throughputs are within {100 * most:.1f} % of the simulated ones" in words_of("schedules_compared")


@pytest.mark.parametrize(("devices", "chunks"), [("16", ("8", "32", "128")), ("64", ("32",))])
def test_more_devices_stop_helping(devices, chunks):
    rows = {
        row["chunks"]: row
        for row in rows_of("simulated/p40/sweep_unet")
        if (row["device_count"], row["batch_size"], row["checkpoint"]) == (devices, "256", "except_last")
        and row["sweep_kind"] in {"fixed batch", "both"}
    }
    speeds = [speed(rows[chunk]) for chunk in chunks]
    bubbles = [float(rows[chunk]["bubble_fraction"]) for chunk in chunks]
    if devices == "16":
        said = "16 devices reach {:.1f}, {:.1f} and {:.1f} samples/s with 8, 32 and 128 chunks. "
        said = (said + "The bubble falls from {:.0%} to {:.0%} and {:.0%}").format(*speeds, *bubbles)
    else:
        said = f"64 devices with 32 chunks reach {speeds[0]:.1f} samples/s. Half of their time is bubble."
        assert f"{bubbles[0]:.1f}" == "0.5"
    assert said in words_of("claims").replace(" %", "%")
