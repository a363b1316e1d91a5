"""The tables of README and docs: Markdown made from the reference results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.components import PUBLISHED
from gpipe_bench.figures.text import listing
from gpipe_bench.results.outcomes import THROUGHPUT, group_rows
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import plain_records, read_table
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.table import TWO_PER_DEVICE, device_count
from gpipe_bench.suite.published.measured import DEVICE_BOUND, measured_steps
from gpipe_bench.suite.published.measured import TABLES as MEASURED
from scripts.leaderboard import SHOWN_HEADER, leaders, shown

if TYPE_CHECKING:
    import pandas as pd

    from gpipe_bench.results.shapley import Share

ROOT: Final = Path(__file__).resolve().parent.parent
REFERENCE: Final = ROOT / "results" / "reference"
_RACE: Final = "measured/2x-amd-epyc/peers"
_RACE_OF_PROCESSES: Final = "measured/2x-intel-xeon-processor-processes/peers"
_CONTENDERS: Final = (
    "engine-autograd",
    "engine-1f1b",
    "engine-zb-h1",
    "torchgpipe",
    "fairscale",
    "pipelining-1f1b",
    "pipelining-zero-bubble",
    "plain",
    "plain-threads",
    "loop-processes",
)
_PROCESSES: Final = (
    "distributed-1f1b",
    "distributed-zb-h1",
    "distributed-zb-v",
    "pipelining-1f1b",
    "pipelining-zero-bubble",
    "pipelining-zb-v",
)
_GPU: Final = "measured/1x-nvidia-h100-80gb-hbm3/ablation"
_EFFECTS: Final = ROOT / "studies" / "simulator" / "effects.csv"
_RESERVED: Final = "peak_reserved_gib"
_NAMES: Final = {
    "throughput_samples_per_s": "samples/s",
    "throughput_samples_per_s_per_device": "samples/s per device",
    "peak_reserved_gib": "memory GiB",
    "fullest_peak_allocated_gib": "GiB allocated, fullest device",
    "utilization_fraction": "busy",
    "model_memory_gib": "model GiB",
    "activation_memory_gib": "activations GiB",
    "model_flops_utilization_fraction": "MFU",
}

Record = Mapping[str, Any]
Place = tuple[str, int, int]


def cells_table(table: str) -> str:
    """Published and simulated values: a line per row of ``table``, columns per metric."""
    chosen = _predictions()
    chosen = chosen[chosen["table"] == table]
    metrics = chosen["metric"].unique()
    lines = []
    for experiment, own in chosen.groupby("experiment", sort=False):
        cells = {cell["metric"]: cell for cell in plain_records(own)}
        lines.append([f"`{experiment}`", *(word for metric in metrics for word in _pair(cells[metric]))])
    kinds = ("published", "simulated")
    return markdown(["benchmark", *(f"{_NAMES[metric]}, {kind}" for metric in metrics for kind in kinds)], lines)


def errors_table() -> str:
    """A line per benchmark on P40s: cells predicted, mean absolute error, largest error; held out cells are apart."""
    known = _predictions().dropna(subset="error_fraction")
    predicted = known[known["role"] == "predicted"]
    families = {f"`{name}`": own for name, own in predicted.groupby("table", sort=False)}
    families |= {"**all**": predicted, "held out: `resnet101-speed`": known[known["role"] == "held_out"]}
    lines = []
    for label, own in families.items():
        errors = own["error_fraction"].abs()
        (worst,) = plain_records(own.loc[[errors.idxmax()]])
        where = f"`{worst['experiment']}`, {_NAMES[worst['metric']]}"
        lines.append([label, str(len(own)), f"{errors.mean():.1%}", f"{worst['error_fraction']:+.1%} ({where})"])
    return markdown(["benchmark", "predicted cells", "mean absolute error", "largest"], lines)


def transferred_table() -> str:
    """Runs on hardware that has constants from elsewhere, by package and GPU."""
    rows = _predictions()
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in plain_records(rows[rows["role"] == "transferred"]):
        package = row["table"].removesuffix("-h100").removesuffix("-nodes")
        if package.startswith("libai"):  # its tables have runs of Megatron-LM, too
            package = row["experiment"].rpartition("-")[2]
        group = f"`{package}`", row["profile"].upper(), _NAMES[row["metric"]]
        groups.setdefault(group, []).append(row["error_fraction"])
    lines = [[*group, str(len(errors)), *_mean_and_range(errors)] for group, errors in groups.items()]
    return markdown(["runs", "GPU", "quantity", "cells", "mean absolute error", "from, to"], lines)


def _mean_and_range(errors: Sequence[float]) -> tuple[str, str]:
    return f"{mean(map(abs, errors)):.1%}", f"{min(errors):+.1%} to {max(errors):+.1%}"


def mechanisms_table() -> str:
    """A line per mechanism without which the simulator changes a published cell by 30 % or more: the range of changes.

    The first line is the error of the whole simulator; changes below half a percent are left out.
    """
    import pandas as pd

    rows = pd.read_csv(_EFFECTS, index_col="left_out")
    lines = []
    for name, changes in rows.iterrows():
        if name != rows.index[0] and (str(name).startswith("other value") or changes.abs().max() < 0.3):
            continue
        kinds = (changes[changes.index.str.endswith(f"_{kind}_fraction")] for kind in ("throughput", "memory"))
        words = (f"{own.min():+.1%} to {own.max():+.1%}" if own.abs().max() >= 0.005 else "-" for own in kinds)
        lines.append([str(name), *words])
    return markdown(["left out", "samples/s", "GiB reserved"], lines)


def measured_schedules_table() -> str:
    """A line per schedule that was measured on two cores, in one process and in two, the fastest in one first."""
    rows = _read("measured/2x-intel-xeon-processor/schedules")
    found = {}
    for name, own in rows.groupby("schedule", sort=False):
        speeds = [own[own["processes"] == count][THROUGHPUT] for count in (1, 2)]
        memory = f"{1024 * own['peak_allocated_gib'].iloc[0]:.0f}"
        found[speeds[0].median()] = [f"`{name}`", *map(_range, speeds), memory]
    header = ("schedule", "samples/s, one process", "samples/s, two processes", "MiB of tensors")
    return markdown(header, [found[speed] for speed in sorted(found, reverse=True)])


def sides_table(places: Sequence[Place], sides: Mapping[str, Callable[[Record], bool]]) -> str:
    """The schedules without checkpoints on H100s, see :func:`schedule_sides`."""
    rows = _read("simulated/h100/schedules", Row)
    return schedule_sides(rows[rows["checkpoint"] == "never"], places, sides)


def schedule_sides(rows: pd.DataFrame, places: Sequence[Place], sides: Mapping[str, Callable[[Record], bool]]) -> str:
    """A line per place: what is the fastest on each side, and how schedules with two partitions per device do there.

    Args:
        rows: of schedules.
        places: network, devices and micro-batches.
        sides: which rows there are, by words such as "in bfloat16".
    """
    found: dict[Place, dict[str, dict[str, float]]] = {place: {side: {} for side in sides} for place in places}
    for row in plain_records(rows[rows["status"] == "ok"]):
        place = row["model"], device_count(row["schedule"], row["partitions"]), row["chunks"]
        for side, fits in sides.items():
            if place in places and fits(row):
                found[place][side][row["schedule"]] = row[THROUGHPUT]
    lines = []
    for (model, p, m), own in found.items():
        words = [word for side in own.values() for word in (_fastest(side), _beaten_by_two(side))]
        lines.append([f"{model}, p = {p}, m = {m}", *words])
    header = [f"{what} {side}" for side in sides for what in ("fastest", "two per device")]
    return markdown(["network", *header], lines)


def _fastest(speeds: Mapping[str, float]) -> str:
    """The fastest schedules, with their throughput over that of 1F1B."""
    most = max(speeds.values())
    return f"{listing([f'`{name}`' for name in speeds if speeds[name] == most])} ({most / speeds['1f1b']:.2f})"


def _beaten_by_two(speeds: Mapping[str, float]) -> str:
    """How many of the schedules with two partitions per device are faster than 1F1B."""
    two = [speeds[name] for name in TWO_PER_DEVICE if name in speeds]
    return f"{sum(speed > speeds['1f1b'] for speed in two)} of {len(two)}"


def _is(precision: str, *, overlap: bool = True) -> Callable[[Record], bool]:
    """Whether a row has this precision and steps; older rows, which say neither, are in float32 and overlap."""

    def fits(row: Record) -> bool:
        return (row["precision"] or "float32", row["steps_overlap"] is not False) == (precision, overlap)

    return fits


def residuals_table() -> str:
    """A line per schedule, on H100s of one host: samples/s and GiB of each network."""
    table = "simulated/h100/residuals"
    rows = _read(table, Row)
    rows = rows[rows["hosts"] == 1]
    fullest = _read(f"{table}_devices").groupby("cell")["peak_allocated_gib"].max()
    columns = {
        "plain": rows["model"] == "decoder",
        "residuals": rows["model_args"].str.endswith("recompute=true") & (rows["variant"] == "dep-str-ptl"),
        "a copy per reader": rows["variant"] == "dep-str-ptl-clk-rec-x",
        "mixes kept": rows["model_args"].str.endswith("recompute=false"),
    }
    cells = {(row["schedule"], name): row for name, own in columns.items() for row in plain_records(rows[own])}
    lines = []
    for schedule in SCHEDULES:
        own = [cells[schedule, name] for name in columns]
        speeds = [row[THROUGHPUT] if row["status"] == "ok" else None for row in own]
        if not any(speeds):
            continue
        cost = f"{1 - speeds[1] / speeds[0]:.0%}" if speeds[0] and speeds[1] else "-"
        words = [
            f"{speed:.2f}, {fullest[row['cell']]:.0f} GiB" if speed else "-"
            for speed, row in zip(speeds, own, strict=True)
        ]
        lines.append([f"`{schedule}`", *words[:2], cost, *words[2:]])
    plain, *others = columns
    return markdown(["schedule", plain, others[0], "cost", *others[1:]], lines)


def peers_table(race: str, networks: Sequence[str], shown: Sequence[str]) -> str:
    """A line per contender ``shown``, a column per network and checkpoint mode: throughput over that of the loop.

    Then the limit, and where loops ran at the same time, what is left of it as these cores ran together.
    """
    rows = _read(race)
    rows = rows[rows["workload"].isin(networks)]
    cases = rows[["workload", "checkpoint"]].drop_duplicates().to_numpy().tolist()
    found = {(row["contender"], row["workload"], row["checkpoint"]): _ratio(row) for row in plain_records(rows)}
    names = set(rows["contender"])
    lines = [[f"`{name}`", *(found.get((name, *case), "") for case in cases)] for name in shown]
    loops, least = (rows[rows["contender"] == name] for name in ("loop", "engine-scheduled"))
    limits = (loops["limit_samples_per_s"] / loops[THROUGHPUT]).to_list()
    lines.append(["limit", *(f"{limit:.2f}" for limit in limits)])
    if len(least) and least["gap_contention_ms"].notna().all() and "loop-processes" in names:
        left = 1 / (1 + least["gap_contention_ms"] / least["limit_ms"])
        lines.append(["limit of these cores", *(f"{a * b:.2f}" for a, b in zip(limits, left, strict=True))])
    return markdown(["contender", *(f"`{workload}`, `{mode}`" for workload, mode in cases)], lines)


def summary_table() -> str:
    """A line per published variant: published, simulated and emulated side by side."""
    simulated, emulated = _read("simulated/p40/ablation"), _read("emulated/p40/ablation")
    simulated, printed = simulated[simulated["flavour"] == "published"], _ablation_as_published()
    lines = []
    for variant in PUBLISHED:
        line = [f"`{variant}`"]
        for metric in (THROUGHPUT, _RESERVED):
            line += [f"{printed[variant, metric]:.1f}", _range(_of(simulated, variant)[metric])]
            line.append(_range(_of(emulated, variant)[metric]))
        lines.append(line)
    kinds = [f"{name}, {kind}" for name in ("samples/s", "GiB") for kind in ("published", "simulated", "emulated")]
    return markdown(["variant", *kinds], lines)


def gpu_table() -> str:
    """A line per published variant: throughput and memory on a GPU that partitions share, by kind of evidence."""
    kinds = {"measured": _read(_GPU)}
    kinds["measured"] = kinds["measured"][kinds["measured"]["status"] == "ok"]
    kinds |= {kind: _read(f"{kind}/h100/ablation_shared") for kind in ("simulated", "emulated")}
    lines = []
    for name in PUBLISHED:
        own, base = ([_of(rows, variant) for rows in kinds.values()] for variant in (name, "baseline"))
        line = [f"`{name}`"]
        for rows, first in zip(own, base, strict=True):
            rate = rows[THROUGHPUT].median()
            line.append(f"{rate:.1f} ({rate / first[THROUGHPUT].median():.2f})")
        line += [f"{rows[metric].median():.1f}" for metric in ("peak_allocated_gib", _RESERVED) for rows in own]
        lines.append(line)
    metrics = ("samples/s", "GiB allocated", "GiB reserved")
    return markdown(["variant", *(f"{metric}, {kind}" for metric in metrics for kind in kinds)], lines)


def steps_table() -> str:
    """A line per precision and what bounds a step that was measured on an H200: errors of its time."""
    rows, simulated = _read("measured/1x-nvidia-h200/single"), _read("simulated/h200/single")
    how = _read("measured/1x-nvidia-h200/single_configurations").set_index("config_sha256")["configuration"]
    errors: dict[tuple[str, str], list[float]] = {}
    for row, step_ms in zip(plain_records(rows), simulated["step_time_ms"], strict=True):
        settings, measured = json.loads(how[row["config_sha256"]]), row["step_time_ms"]
        bound = "device" if settings["host_ms"] <= DEVICE_BOUND * measured else "host"
        errors.setdefault((bound, settings["precision"]), []).append(step_ms / measured - 1)
    lines = [[*group, str(len(own)), *_mean_and_range(own)] for group, own in sorted(errors.items())]
    return markdown(["bound by", "precision", "steps", "mean absolute error", "from, to"], lines)


@cache
def pipelines_table() -> str:
    """A line per way to run a pipeline on an H200: errors of the times of its steps."""
    table = MEASURED["h200-pipelines"]
    errors: dict[str, list[float]] = {}
    for step in measured_steps(table):
        errors.setdefault(step.run_as, []).append(step.error_fraction)
    lines = []
    for name, own in errors.items():
        average, extent = _mean_and_range(own)
        lines.append([name, str(len(own)), extent, "sets `launch_us`" if name == table.host_of else average])
    return markdown(["run as", "steps", "from, to", "mean absolute error"], lines)


def shares_table() -> str:
    """A line per component: its Shapley values of throughput and memory, by the autograd engine they hold for."""
    cases = {
        "1.3": ("simulated", "published"),
        "2, simulated": ("simulated", "current"),
        "2, emulated": ("emulated", ""),
    }
    shares: dict[str, tuple[Mapping[str, Share], Mapping[str, Share]]] = {}
    for name, (kind, flavour) in cases.items():
        rows = _read(f"{kind}/p40/ablation", Row)
        own = rows[rows["flavour"] == flavour] if flavour else rows
        (group,) = group_rows([Row(**row) for row in plain_records(own)])
        shares[name] = group.shares(THROUGHPUT), group.shares(_RESERVED)
    lines = []
    for component in next(iter(shares.values()))[0]:
        line = [f"`{component}`"]
        for speeds, sizes in shares.values():
            line += [f"{speeds[component].value:+.1f}", f"{sizes[component].value:+.1f}"]
        lines.append(line)
    header = [f"{unit}, PyTorch {name}" for name in shares for unit in ("samples/s", "GiB")]
    return markdown(["component", *header], lines)


def gpipe_paper_table() -> str:
    """A line per n and m: throughput over that of n = 2, m = 1, of AmoebaNet-D and of GPipe's Transformer-48."""
    published = _read("published/published")
    of_gpipe = published[published["table"] == "gpipe-table-2"]
    transformer = {row["experiment"]: row["value"] for row in plain_records(of_gpipe)}
    rows = published[published["table"] == "amoebanet-d-speed"]
    printed = {(row["experiment"], row["metric"]): row["value"] for row in plain_records(rows)}
    known = _predictions()
    known = known[(known["table"] == "amoebanet-d-speed") & (known["metric"] == THROUGHPUT)]
    simulated = {row["experiment"]: row["simulated"] for row in plain_records(known)}
    lines = []
    for name in rows["experiment"].unique():
        theirs = printed[name, THROUGHPUT] / printed["n2m1", THROUGHPUT]
        ratios = printed[name, "normalized_throughput"], theirs, simulated[name] / simulated["n2m1"]
        n, m = name[1:].split("m")
        alike = transformer[f"K={n},M={m}"]
        lines.append([f"n = {n}, m = {m}", *(f"{ratio:.2f}" for ratio in (*ratios, alike))])
    return markdown(
        [
            "AmoebaNet-D (18, 256)",
            "GPipe, published (TPUs)",
            "torchgpipe, published (P40s)",
            "torchgpipe, simulated",
            "Transformer-48: GPipe, published (TPUs)",
        ],
        lines,
    )


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "summary": summary_table,
    "paper-shares": shares_table,
    "paper-gpipe": gpipe_paper_table,
    "gpu": gpu_table,
    "errors": errors_table,
    "measured-steps": steps_table,
    "transferred": transferred_table,
    "mechanisms": mechanisms_table,
    "schedules-measured": measured_schedules_table,
    "schedules-precisions": partial(
        sides_table,
        [("gpt2-xl", 8, 16), ("gpt2-xl", 32, 16), ("vit", 8, 16), ("vit", 32, 16)],
        {"in float32": _is("float32"), "in bfloat16": _is("bfloat16")},
    ),
    "schedules-steps": partial(
        sides_table,
        [("vit", 8, 16), ("gpt2-xl", 32, 64)],
        {"with overlap": _is("float32"), "without overlap": _is("float32", overlap=False)},
    ),
    "residuals": residuals_table,
    "measured-pipelines": pipelines_table,
    "ablation": partial(cells_table, "ablation"),
    "resnet-speed": partial(cells_table, "resnet101-speed"),
    "peers": partial(peers_table, _RACE, ["unet"], _CONTENDERS),
    "peers-processes": partial(peers_table, _RACE_OF_PROCESSES, ["unet", "decoder"], _PROCESSES),
    "leaderboard": lambda: markdown(SHOWN_HEADER, shown(leaders())),
}
"""Makes each table from the reference results."""


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its first column to the left and the others to the right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def _read(place: str, records: type[Row] | None = None) -> pd.DataFrame:
    """A table of the reference results; ``records``: its rows, whose columns older tables may lack."""
    return read_table(REFERENCE / f"{place}.csv", records=records)


def _predictions() -> pd.DataFrame:
    """Published cells and what the simulator says of them, the hardware of the fitted ones first."""
    import pandas as pd

    return pd.concat([_read(f"simulated/{profile}/predictions") for profile in ("p40", "v100", "h100", "a100")])


def _ablation_as_published() -> Mapping[tuple[str, str], float]:
    """The values of torchgpipe's ablation, by variant and metric."""
    rows = _read("published/published")
    known = plain_records(rows[rows["table"] == "ablation"])
    return {(row["experiment"], row["metric"]): row["value"] for row in known}


def _of(rows: pd.DataFrame, variant: str) -> pd.DataFrame:
    return rows[rows["variant"] == variant]


def _range(values: Iterable[float]) -> str:
    """The median of some steps, and their range where they differ."""
    known = list(values)
    low, high = f"{min(known):.1f}", f"{max(known):.1f}"
    return low if low == high else f"{median(known):.1f} ({low}-{high})"


def _ratio(row: Record) -> str:
    """A ratio with its interval, or what happened instead."""
    if row["status"] != "ok":
        return str(row["status"])
    if row["ratio"] == row["ratio_low"] == row["ratio_high"]:
        return f"{row['ratio']:.2f}"
    return f"{row['ratio']:.2f} ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})"


def _pair(cell: Record) -> list[str]:
    """Published and simulated value of a cell, and the error with the latter."""
    share = cell["metric"].endswith("_fraction")
    words = [_value(cell[kind], share=share) for kind in ("published", "simulated")]
    fitted = ", fitted" if cell["role"] == "fitted" else ""
    return [words[0], f"{words[1]} ({cell['error_fraction']:+.1%}{fitted})"]


def _value(value: float, *, share: bool) -> str:
    return f"{value:.0%}" if share else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
