"""Sentences of docs say what the committed rows hold."""

from __future__ import annotations

import csv
import json
from statistics import mean, median

import pytest
import yaml

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.machine.networks import NETWORK
from gpipe_bench.results.shapley import shapley_shares
from gpipe_bench.schedules.printed import printed_steps
from gpipe_bench.suite.published.measured import DEVICE_BOUND
from tests.project.pages import PAGES
from tests.project.tree import ROOT
from tests.simulator.support import TOLERANCE

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


def test_steps_of_an_h200_are_off_by_what_claims_say():
    table = "measured/1x-nvidia-h200/single"
    hosts = {
        row["config_sha256"]: json.loads(row["configuration"])["host_ms"] for row in rows_of(f"{table}_configurations")
    }
    errors = {"device": [], "host": []}
    for row, simulated in zip(rows_of(table), rows_of("simulated/h200/single"), strict=True):
        took = float(row["step_time_ms"])
        bound = "device" if hosts[row["config_sha256"]] <= DEVICE_BOUND * took else "host"
        errors[bound].append(abs(float(simulated["step_time_ms"]) / took - 1))
    device, host = (f"{100 * mean(errors[bound]):.1f} %" for bound in ("device", "host"))
    said = f"{device} over the {len(errors['device'])} steps that are bound by the device, and {host} over the"
    assert f"{said} {len(errors['host'])} that are bound by the host" in words_of("claims")
    assert f"| time | {device} |" in words_of("simulator_errors")


def test_arithmetic_is_above_measured_throughputs_by_what_claims_say():
    errors = {}
    for step in printed_steps():
        if step.error_fraction is not None:
            errors.setdefault(step.schedule, []).append(step.error_fraction)
    percents = [f"{100 * mean(errors[name]):.1f}" for name in ("1f1b", "zb_h1", "interleaved")]
    said = "by {} % with 1F1B, {} % with ZB-1p, which is timed as ZB-H1, and {} % with interleaved 1F1B, on average"
    assert said.format(*percents) in words_of("claims")
    assert f"| throughput | {percents[0]} to {percents[-1]} % |" in words_of("simulator_errors")


def test_the_advice_for_four_p40s_and_what_other_choices_cost():
    rows = {
        (row["chunks"], row["checkpoint"]): row
        for row in rows_of("simulated/p40/advice_unet")
        if (row["schedule"], row["partitions"]) == ("gpipe", "4") and row["run_as"] == "paper's executor"
    }
    (chunks, mode), best = max(
        ((key, row) for key, row in rows.items() if row["status"] == "ok"), key=lambda one: speed(one[1])
    )
    costs = (100 * (1 - speed(rows[key]) / speed(best)) for key in ((chunks, "always"), ("8", mode)))
    said = f"balance `{best['balance']}`, {chunks} chunks, `{mode}`, with {speed(best):.1f} samples/s simulated. "
    said += "`always` costs {:.1f} %, eight chunks {:.1f} %. `never` does not fit the memory.".format(*costs)
    assert said in words_of("claims")
    assert {row["status"] for (_, mode), row in rows.items() if mode == "never"} == {"oom"}
    eight = [
        row for row in rows_of("simulated/p40/advice_unet") if row["status"] == "ok" and row["device_count"] == "8"
    ]
    best = max(eight, key=speed)
    (equal,) = (row for row in eight if row["balance"] == "31-30-30-30-30-30-30-30")
    assert [equal[name] for name in ("schedule", "chunks")] == [best[name] for name in ("schedule", "chunks")]
    cost = 100 * (1 - speed(equal) / speed(best))
    said = f"`{best['schedule']}` is the fastest; equal numbers of layers cost it {cost:.0f} %"
    assert said in words_of("claims")


def test_the_published_value_that_does_not_fit_its_neighbours():
    took = {
        row["experiment"]: 1 / float(row["value"])
        for row in rows_of("published/published")
        if (row["table"], row["metric"]) == ("amoebanet-d-speed", "throughput_samples_per_s")
    }
    per_bubble = (took["n4m1"] - took["n4m32"]) / (1 - 1 / 32)
    implied = 1 / (took["n4m1"] - per_bubble * (1 - 1 / 4))
    said = (
        f"published as {1 / took['n4m4']:.1f} samples/s; if the time of a sample is linear in 1/m, `n4m1` and `n4m32`"
    )
    assert f"{said} of the same table imply {implied:.0f}." in words_of("claims")


def test_predictions_for_p40s_are_off_by_what_the_pages_say():
    known = {(row["table"], row["experiment"], row["metric"]): row for row in rows_of("simulated/p40/predictions")}
    error = {key: 100 * float(row["error_fraction"]) for key, row in known.items() if row["error_fraction"]}
    used = [
        100 * float(known["ablation", name, "utilization_fraction"][kind])
        for kind in ("published", "simulated")
        for name in ("baseline", "dep-str-ptl")
    ]
    said = "{:.0f} % of the time at first and {:.0f} % at last | Yes: {:.0f} and {:.0f} % simulated for PyTorch 1.3"
    assert said.format(*used) in words_of("paper")
    most = [max(abs(error[key]) for key in error if key[0] == f"{name}-memory") for name in ("unet", "amoebanet-d")]
    assert "U-Net and AmoebaNet-D is predicted within {:.0f} and {:.0f} %".format(*most) in words_of("paper")
    activations = [error[key] for key in error if key[2] == "activation_memory_gib"]
    assert max(activations) < 0
    said = f"are too small in every row of its table, by up to {-min(activations):.0f} %"
    assert said in words_of("simulator_errors")
    single = [error["unet-memory", name, "peak_reserved_gib"] for name in ("baseline", "pipeline-1")]
    said = "**U-Net memory on one device** is {:.0f} to {:.0f} % too high"
    assert said.format(*sorted(single)) in words_of("simulator_errors")


def test_the_ablation_on_one_h100_is_too_slow_by_what_the_page_says():
    def times(table):
        rows = [row for row in rows_of(table) if row["status"] == "ok"]
        names = {row["variant"] for row in rows}
        return {name: median(float(row["step_time_ms"]) for row in rows if row["variant"] == name) for name in names}

    measured, simulated = times("measured/1x-nvidia-h100-80gb-hbm3/ablation"), times("simulated/h100/ablation_shared")
    errors = [100 * (simulated[name] / measured[name] - 1) for name in measured]
    assert f"comes out {min(errors):.0f} to {max(errors):.0f} % too slow, in the right order" in words_of(
        "simulator_errors"
    )
    in_order = [simulated[name] for name in sorted(measured, key=measured.get)]
    assert in_order == sorted(in_order)


def test_the_page_of_the_simulator_has_the_networks_and_the_tolerance_of_its_tests():
    networks = yaml.safe_load((ROOT / "gpipe_bench/machine/networks.yaml").read_text(encoding="utf-8"))
    lines = []
    for name, link in networks.items():
        no_limit = name == "ideal"
        cards = (
            "no limit" if name in {"gloo", "ideal"} else f"one for each {'host' if link.get('shared') else 'device'}"
        )
        default = " (default)" if name == NETWORK else ""
        took = "0" if no_limit else f"{link['latency_us']} µs"
        lines.append(f"| `{name}`{default} | {'no limit' if no_limit else link['gb_per_s']} | {took} | {cards} |")
    assert "\n|:--|--:|--:|:--|\n" + "\n".join(lines) + "\n\n" in PAGES["docs/simulator.md"]
    assert f"agrees with the engine's on the CPU within {100 * TOLERANCE:.0f} %" in words_of("simulator")


def test_layers_of_gpt2_xl():
    layers = {
        sum(map(int, row["balance"].split("-")))
        for row in rows_of("simulated/h100/sweep_gpt2-xl")
        if row["partitions"] == "64" and row["balance"]
    }
    words = words_of("schedules_compared")
    assert [f"GPT-2 XL has {count} layers for 64 partitions" in words for count in layers] == [True]
