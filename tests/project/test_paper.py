"""Sentences of docs/paper.md about components say what the rows of the ablation say."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping

import pytest

from gpipe_bench.data import REFERENCE_FOLDER
from tests.project.pages import PAGES

COMPONENTS = ("clock_cycle", "fork_join", "copy_streams", "portals", "early_recompute")
WORDS = " ".join(PAGES["docs/paper.md"].split())
ALL = (True,) * 5
Ablation = Mapping[tuple[bool, ...], tuple[float, float]]


def ablation(evidence: str, flavour: str) -> Ablation:
    """Samples/s and reserved GiB of all 32 combinations of the components on P40s."""
    with (REFERENCE_FOLDER / evidence / "p40" / "ablation.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["flavour"] == flavour]
    found = {
        tuple(row[name] == "True" for name in COMPONENTS): (
            float(row["throughput_samples_per_s"]),
            float(row["peak_reserved_gib"]),
        )
        for row in rows
    }
    assert len(found) == len(rows) == 32
    return found


OLD, NEW, EMULATED = ablation("simulated", "published"), ablation("simulated", "current"), ablation("emulated", "")


def gains(rows: Ablation, place: int, **others: bool) -> list[float]:
    """What switching on the component at ``place`` brings in samples/s, where the others are as given."""
    fixed = {COMPONENTS.index(name): value for name, value in others.items()}
    off = [one for one in rows if not one[place] and all(one[k] == value for k, value in fixed.items())]
    return [rows[(*one[:place], True, *one[place + 1 :])][0] - rows[one][0] for one in off]


def span(values: list[float], form: str) -> tuple[str, str]:
    return format(min(values), form), format(max(values), form)


def test_clock_cycles_with_and_without_fork_join():
    on = [gain for rows in (OLD, NEW, EMULATED) for gain in gains(rows, 0, fork_join=True)]
    assert "change throughput by {} to {} samples/s".format(*span(on, "+.1f")) in WORDS
    others = dict.fromkeys(COMPONENTS[1:], True)
    assert all(gains(rows, 0, **others) == pytest.approx([0], abs=1e-3) for rows in (OLD, NEW, EMULATED))
    old, today = gains(OLD, 0, fork_join=False), gains(NEW, 0, fork_join=False) + gains(EMULATED, 0, fork_join=False)
    words = "by {} to {} samples/s (PyTorch 1.3) or {} to {} (today's)"
    assert words.format(*span(old, "+.1f"), *span(today, "+.1f")) in WORDS


def test_fork_join_with_either_autograd_engine():
    with_clock, without = (span(gains(OLD, 1, clock_cycle=on), ".1f") for on in (True, False))
    assert "worth {} to {} samples/s with clock-cycles, and {} to {} without".format(*with_clock, *without) in WORDS
    for rows in (NEW, EMULATED):
        hidden = gains(rows, 1, clock_cycle=True, early_recompute=True)
        assert min(hidden) > 3
        others = [*gains(rows, 1, clock_cycle=False), *gains(rows, 1, early_recompute=False)]
        assert others == pytest.approx([0] * 16, abs=1e-3)


def test_what_can_be_left_out():
    few = (False, False, True, True, True)
    (speed, memory), (whole, most) = EMULATED[few], EMULATED[ALL]
    assert f"{whole:.1f}" == f"{speed:.1f}"
    words = f"reach the {speed:.1f} samples/s of all components together, in {memory:.1f} instead of {most:.1f} GiB"
    assert words in WORDS
    (speed, memory), (whole, most) = OLD[few], OLD[ALL]
    words = f"reaches {speed:.1f} of {whole:.1f} samples/s, and takes {memory:.1f} instead of {most:.1f} GiB"
    assert words in WORDS
    assert OLD[(False, *ALL[1:])] == pytest.approx(OLD[ALL])


def test_what_portals_save_and_gain():
    runs = (OLD, NEW, EMULATED)
    single = [gain for rows in runs for gain in gains(rows, 3)]
    assert "They change throughput by {} to {} samples/s".format(*span(single, "+.1f")) in WORDS
    [gain] = gains(OLD, 3, **{name: True for name in COMPONENTS if name != "portals"})
    with (REFERENCE_FOLDER / "published" / "published.csv").open(newline="", encoding="utf-8") as file:
        printed = {
            row["experiment"]: float(row["value"])
            for row in csv.DictReader(file)
            if row["table"] == "ablation" and row["metric"] == "throughput_samples_per_s"
        }
    published = printed["dep-str-ptl"] - printed["dep-str-x"]
    shares = [
        float(field[1:]) for field in re.findall(r"`portals` \| (.*) \|", PAGES["docs/paper.md"])[0].split(" | ")[1::2]
    ]
    words = "save {} to {} GiB of memory, and gain {:.1f} samples/s if all other components are on (published: {:.1f})"
    assert words.format(min(shares), max(shares), gain, published) in WORDS


def test_how_much_faster_all_components_are():
    baseline = (True, False, False, False, True)
    simulated, emulated = (rows[ALL][0] / rows[baseline][0] for rows in (OLD, EMULATED))
    assert f"{simulated:.2f} times simulated for PyTorch 1.3. Today {emulated:.2f} times (emulated)" in WORDS


def test_scaling_beside_gpipe():
    lines = re.findall(r"^\| n = (\d), m = (\d+) \| (.*) \|$", PAGES["docs/paper.md"], re.MULTILINE)
    scaled = {(int(n), int(m)): [float(value) for value in values.split(" | ")] for n, m, values in lines}
    assert len(scaled) == 9
    for (n, m), (gpipe, published, simulated, transformer) in scaled.items():
        if m == 1:
            assert (max(published, simulated) < gpipe) == (n > 2)
        else:
            assert gpipe < published < transformer
            assert gpipe < simulated < transformer
    gpipe, published, *_ = scaled[8, 32]
    assert f"With 8 devices and 32 micro-batches it scales {published:.2f} times, GPipe {gpipe:.2f}" in WORDS
