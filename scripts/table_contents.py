"""The tables of README and docs: Markdown made from the reference results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Final

from gpipe_bench.components import PUBLISHED
from gpipe_bench.results.outcomes import THROUGHPUT
from gpipe_bench.results.tables import read_text
from gpipe_bench.simulator.measured import DEVICE_BOUND

ROOT: Final = Path(__file__).resolve().parent.parent
REFERENCE: Final = ROOT / "results" / "reference"
MACHINE: Final = "2x-amd-epyc"
"""Measured on a CPU: the race of peers."""
PROCESSES: Final = "2x-intel-xeon-processor-processes"
"""Measured on a CPU: the race of pipelines with a process for each device."""
GPU: Final = "1x-nvidia-h100-80gb-hbm3"
"""Measured on a GPU: the ablation."""

_NAMES: Final = {
    "throughput_samples_per_s": "samples/s",
    "peak_reserved_gib": "memory GiB",
    "utilization_fraction": "busy",
    "model_memory_gib": "model GiB",
    "activation_memory_gib": "activations GiB",
}

Record = Mapping[str, str]


def predictions(folder: Path = REFERENCE) -> list[Record]:
    """Published cells and what the simulator says of them."""
    return _read(folder / "simulated" / "p40" / "predictions.csv")


def cells_table(*tables: str) -> Callable[[Sequence[Record]], str]:
    """Makes a Markdown table of published and simulated values: a line per row of ``tables``, columns per metric."""

    def table(records: Sequence[Record]) -> str:
        chosen = [record for record in records if record["table"] in tables]
        metrics = list(dict.fromkeys(record["metric"] for record in chosen))
        rows = list(dict.fromkeys((record["table"], record["experiment"]) for record in chosen))
        found = {(record["table"], record["experiment"], record["metric"]): record for record in chosen}
        header = ["benchmark", *(f"{_NAMES[name]}, {kind}" for name in metrics for kind in ("published", "simulated"))]
        lines = []
        for name, experiment in rows:
            line = [f"`{experiment}`" if len(tables) == 1 else f"`{name}` `{experiment}`"]
            for metric in metrics:
                line += _pair(found.get((name, experiment, metric)))
            lines.append(line)
        return markdown(header, lines)

    return table


def errors_table(records: Sequence[Record]) -> str:
    """A line per benchmark: cells predicted, mean absolute error, largest error; those held out are apart."""
    known = [record for record in records if record["error_fraction"]]
    predicted = [record for record in known if record["role"] == "predicted"]
    held_out = [record for record in known if record["role"] == "held_out"]
    families = {f"`{name}`": [record for record in predicted if record["table"] == name]
                for name in dict.fromkeys(record["table"] for record in predicted)}  # fmt: skip
    families |= {"**all**": predicted, "held out: `resnet101-speed`": held_out}
    lines = []
    for label, own in families.items():
        worst = max(own, key=lambda record: abs(float(record["error_fraction"])))
        where = f"`{worst['experiment']}`, {_NAMES[worst['metric']]}"
        error = mean(abs(float(record["error_fraction"])) for record in own)
        lines.append([label, str(len(own)), f"{error:.1%}", f"{float(worst['error_fraction']):+.1%} ({where})"])
    return markdown(["benchmark", "predicted cells", "mean absolute error", "largest"], lines)


def races(folder: Path = REFERENCE, machine: str = MACHINE) -> list[Record]:
    """Rows of a race of pipelines."""
    return _read(folder / "measured" / machine / "peers.csv")


def peers_table(records: Sequence[Record]) -> str:
    """A line per contender, a column per network and checkpoint mode: throughput over the single-threaded loop's.

    Then the limit, and where loops ran at the same time, what is left of it as these cores ran together.
    """
    rows = [record for record in records if record["workload"] not in {"cells", "combinations"}]
    cases = list(dict.fromkeys((record["workload"], record["checkpoint"]) for record in rows))
    found = {(record["contender"], record["workload"], record["checkpoint"]): record for record in rows}
    names = dict.fromkeys(record["contender"] for record in rows)
    lines = [[f"`{name}`", *(_ratio(found.get((name, *case))) for case in cases)] for name in names]
    loops = [found["loop", *case] for case in cases]
    limits = [float(loop["limit_samples_per_s"]) / float(loop["throughput_samples_per_s"]) for loop in loops]
    lines.append(["limit", *(f"{limit:.2f}" for limit in limits)])
    least = [found[key] for case in cases if (key := ("engine-scheduled", *case)) in found]
    if least and all(record["gap_contention_ms"] for record in least) and "loop-processes" in names:
        left = [1 / (1 + float(one["gap_contention_ms"]) / float(one["limit_ms"])) for one in least]
        lines.append(["limit of these cores", *(f"{a * b:.2f}" for a, b in zip(limits, left, strict=True))])
    return markdown(["contender", *(f"`{workload}`, `{mode}`" for workload, mode in cases)], lines)


def host_table(records: Sequence[Record]) -> str:
    """A line per checkpoint mode and n, a column per engine: host time per cell over torchgpipe's, with m = 32."""
    rows = [record for record in records if record["workload"] == "cells" and record["chunks"] == "32"]
    found = {(r["contender"], r["checkpoint"], r["partitions"]): r for r in rows}
    columns = sorted({r["contender"] for r in rows if r["contender"].startswith("engine")})
    lines = [
        [f"`{mode}`, n = {n}", *(_ratio(found.get((name, mode, n))) for name in columns)]
        for mode, n in dict.fromkeys((record["checkpoint"], record["partitions"]) for record in rows)
    ]
    return markdown(["cells", *(f"`{name}`" for name in columns)], lines)


def summary_table(folder: Path) -> str:
    """A line per published variant: published, simulated and emulated side by side."""
    known = _read(folder / "simulated" / "p40" / "ablation.csv")
    simulated = {row["variant"]: row for row in known if row["flavour"] == "published"}
    emulated = _read(folder / "emulated" / "p40" / "ablation.csv")
    printed = _ablation_as_published(folder)
    metrics = ("throughput_samples_per_s", "peak_reserved_gib")
    lines = []
    for variant in PUBLISHED:
        line = [f"`{variant}`"]
        for metric in metrics:
            line += [f"{printed[variant, metric]:.1f}", f"{float(simulated[variant][metric]):.1f}"]
            line.append(_range(_values(emulated, variant, metric)))
        lines.append(line)
    kinds = [f"{name}, {kind}" for name in ("samples/s", "GiB") for kind in ("published", "simulated", "emulated")]
    return markdown(["variant", *kinds], lines)


def _range(values: Sequence[float]) -> str:
    """The median of some steps, and their range where they differ."""
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{median(values):.1f} ({low}-{high})"


def emulated_peers_table(folder: Path) -> str:
    """A line per case and variant, a column per package: samples per second, and GiB reserved."""
    rows = _read(folder / "emulated" / "p40" / "peers_emulated.csv")
    packages = list(dict.fromkeys(row["source"] for row in rows))
    lines = []
    for case in dict.fromkeys((row["experiment"], row["variant"]) for row in rows):
        line = [f"`{case[0]}`", f"`{case[1]}`"]
        for package in packages:
            own = [row for row in rows if (row["experiment"], row["variant"], row["source"]) == (*case, package)]
            rates = [float(row["throughput_samples_per_s"]) for row in own]
            line.append(f"{_range(rates)}; {float(own[0]['peak_reserved_gib']):.1f} GiB" if own else "-")
        lines.append(line)
    return markdown(["run", "variant", *packages], lines)


def cpu_table(folder: Path) -> str:
    """A line per way to run the race's U-Net on the CPU of :data:`MACHINE`, without checkpoints, fastest first."""
    rows = [row for row in races(folder) if (row["workload"], row["checkpoint"]) == ("unet", "never")]
    rows.sort(key=lambda row: -float(row["throughput_samples_per_s"]))
    lines = [
        (f"`{row['contender']}`", row["package"], row["processes"], row["threads"],
         f"{float(row['throughput_samples_per_s']):.1f}", _ratio(row), f"{float(row['peak_live_mib']):.0f}")
        for row in rows
    ]  # fmt: skip
    header = [
        "run as",
        "package",
        "processes",
        "threads per operator",
        "samples/s",
        "over `loop` (95 % interval)",
        "MiB",
    ]
    return markdown(header, lines)


def gpu_table(folder: Path) -> str:
    """A line per published variant: throughput and memory on the GPU of :data:`GPU`, measured, simulated, emulated."""
    printed = _ablation_as_published(folder)
    kinds = {"measured": [row for row in _read(folder / "measured" / GPU / "ablation.csv") if row["status"] == "ok"]}
    kinds |= {kind: _read(folder / kind / "h100" / "ablation_shared.csv") for kind in ("simulated", "emulated")}
    lines = []
    for name in PUBLISHED:
        line = [f"`{name}`", f"{printed[name, THROUGHPUT] / printed['baseline', THROUGHPUT]:.2f}"]
        for metric in (THROUGHPUT, "peak_allocated_gib", "peak_reserved_gib"):
            for rows in kinds.values():
                value, base = (median(_values(rows, variant, metric)) for variant in (name, "baseline"))
                line.append(f"{value:.1f} ({value / base:.2f})" if metric == THROUGHPUT else f"{value:.1f}")
        lines.append(line)
    metrics = ("samples/s (over `baseline`)", "GiB allocated", "GiB reserved")
    header = [f"{metric}, {kind}" for metric in metrics for kind in kinds]
    return markdown(["variant", "over `baseline`, published (four P40s)", *header], lines)


def steps_table(folder: Path) -> str:
    """A line per model, precision and batch that was measured on an H200, with the simulated step beside it."""
    rows, simulated = (_read(folder / place / "single.csv") for place in ("measured/1x-nvidia-h200", "simulated/h200"))
    beside = _read(folder / "measured" / "1x-nvidia-h200" / "single_configurations.csv")
    how = {line["config_sha256"]: json.loads(line["configuration"]) for line in beside}
    lines = []
    for row, other in zip(rows, simulated, strict=True):
        settings, measured, found = how[row["config_sha256"]], float(row["step_time_ms"]), float(other["step_time_ms"])
        bound = "device" if settings["host_ms"] <= DEVICE_BOUND * measured else "host"
        times = f"{measured:.1f}", f"{found:.1f} ({found / measured - 1:+.1%})"
        lines.append([f"`{row['model']}` {settings['precision']}", row["batch_size"], *times, bound])
    return markdown(["model", "batch", "ms, measured", "ms, simulated", "bound by"], lines)


def pipelines_table(folder: Path) -> str:
    """A line per way to run four partitions on an H200, a column per batch and mode: measured and simulated steps."""
    measured, simulated = (
        _read(folder / place / "pipelines.csv") for place in ("measured/1x-nvidia-h200", "simulated/h200")
    )
    names = ("model_args", "batch_size", "checkpoint", "partitions", "backward")
    found = {(*(row[name] for name in names), _schedule(row)): float(row["step_time_ms"]) for row in simulated}
    cases = list(dict.fromkeys(tuple(row[name] for name in names[:3]) for row in measured))
    texts: dict[str, dict[tuple[str, ...], str]] = {}
    for row in measured:
        here, there = float(row["step_time_ms"]), found[(*(row[name] for name in names), _schedule(row))]
        own = texts.setdefault(row["source"].partition(": ")[2], {})
        place = tuple(row[name] for name in names[:3])
        own[place] = f"{here:.0f}, {there:.0f} ({there / here - 1:+.0%})"
    header = [f"{size} x {args.rpartition('=')[2]} tokens, `{mode}`" for args, size, mode in cases]
    lines = [[name, *(own.get(case, "") for case in cases)] for name, own in texts.items()]
    return markdown(["run as", *header], lines)


def _schedule(row: Record) -> str:
    return row["schedule"] if row["backward"] == "scheduled" else ""


def _ablation_as_published(folder: Path) -> dict[tuple[str, str], float]:
    """The values of torchgpipe's ablation, by variant and metric."""
    rows = [row for row in _read(folder / "published" / "published.csv") if row["table"] == "ablation"]
    return {(row["experiment"], row["metric"]): float(row["value"]) for row in rows}


def _values(rows: Iterable[Record], variant: str, metric: str) -> list[float]:
    return [float(row[metric]) for row in rows if row["variant"] == variant]


def _predicted(table: Callable[[Sequence[Record]], str]) -> Callable[[Path], str]:
    return lambda folder: table(predictions(folder))


def _raced(table: Callable[[Sequence[Record]], str]) -> Callable[[Path], str]:
    return lambda folder: table(races(folder))


TABLES: Final[Mapping[str, Callable[[Path], str]]] = {
    "summary": summary_table,
    "gpu": gpu_table,
    "cpu": cpu_table,
    "errors": _predicted(errors_table),
    "measured-steps": steps_table,
    "measured-pipelines": pipelines_table,
    "ablation": _predicted(cells_table("ablation")),
    "speed": _predicted(cells_table("unet-speed", "amoebanet-d-speed", "resnet101-speed")),
    "unet-memory": _predicted(cells_table("unet-memory")),
    "amoebanet-d-memory": _predicted(cells_table("amoebanet-d-memory")),
    "peers": _raced(peers_table),
    "peers-host": _raced(host_table),
    "peers-processes": lambda folder: peers_table(races(folder, PROCESSES)),
    "peers-emulated": emulated_peers_table,
}
"""Makes each table from the folder of reference results."""


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its first column to the left and the others to the right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def _ratio(record: Record | None) -> str:
    """A ratio with its interval, or what happened instead."""
    if record is None or record["status"] != "ok":
        return "" if record is None else record["status"]
    if record["ratio"] == record["ratio_low"] == record["ratio_high"]:
        return f"{float(record['ratio']):.2f}"
    return f"{float(record['ratio']):.2f} ({float(record['ratio_low']):.2f}-{float(record['ratio_high']):.2f})"


def _pair(record: Record | None) -> list[str]:
    """Published and simulated value of a cell, the error with the latter; nothing where it does not exist."""
    if record is None:
        return ["", ""]
    share = record["metric"].endswith("_fraction")
    words = [_value(record[kind], share=share) for kind in ("published", "simulated")]
    if record["error_fraction"]:
        fitted = ", fitted" if record["role"] == "fitted" else ""
        words[1] += f" ({float(record['error_fraction']):+.1%}{fitted})"
    return words


def _value(text: str, *, share: bool) -> str:
    if not text:
        return "out of memory"
    value = float(text)
    return f"{value:.0%}" if share else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _read(path: Path) -> list[Record]:
    return [{str(name): value for name, value in record.items()} for record in read_text(path).to_dict("records")]
