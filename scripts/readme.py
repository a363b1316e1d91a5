"""Write the tables of the README from the reference results.

    python -m scripts.readme            write them into README.md
    python -m scripts.readme --check    exit status 1 where they are not what the results give

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; what stands there is replaced.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
README: Final = ROOT / "README.md"
REFERENCE: Final = ROOT / "results" / "reference"

_BLOCK: Final = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
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
    with (folder / "simulated" / "p40" / "predictions.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


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
    """A line per benchmark: how many cells were predicted, their mean absolute error, and the largest."""
    predicted = [record for record in records if record["role"] == "predicted" and record["error_fraction"]]
    lines = []
    for name in [*dict.fromkeys(record["table"] for record in predicted), ""]:
        own = [record for record in predicted if name in ("", record["table"])]
        worst = max(own, key=lambda record: abs(float(record["error_fraction"])))
        where = f"`{worst['experiment']}`, {_NAMES[worst['metric']]}"
        error = mean(abs(float(record["error_fraction"])) for record in own)
        label = f"`{name}`" if name else "**all**"
        lines.append([label, str(len(own)), f"{error:.1%}", f"{float(worst['error_fraction']):+.1%} ({where})"])
    return markdown(["benchmark", "predicted cells", "mean absolute error", "largest"], lines)


def races(folder: Path = REFERENCE) -> list[Record]:
    """Rows of the race of pipelines, of the first machine that has some."""
    path = min(folder.glob("measured/*/peers.csv"))
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


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
    least = [found["engine-scheduled", *case] for case in cases]
    if all(record["gap_contention_ms"] for record in least) and any(name == "loop-processes" for name in names):
        left = [1 / (1 + float(one["gap_contention_ms"]) / float(one["limit_ms"])) for one in least]
        lines.append(["limit of these cores", *(f"{a * b:.2f}" for a, b in zip(limits, left, strict=True))])
    return markdown(["contender", *(f"`{workload}`, `{mode}`" for workload, mode in cases)], lines)


def host_table(records: Sequence[Record]) -> str:
    """A line per checkpoint mode and n, a column per engine and m: host time per cell over torchgpipe's."""
    rows = [record for record in records if record["workload"] == "cells"]
    found = {(r["contender"], r["chunks"], r["checkpoint"], r["partitions"]): r for r in rows}
    columns = [key for key in dict.fromkeys((r["contender"], r["chunks"]) for r in rows) if key[0].startswith("engine")]
    columns.sort(key=lambda column: column[0])
    lines = [
        [f"`{mode}`, n = {n}", *(_ratio(found.get((*column, mode, n))) for column in columns)]
        for mode, n in dict.fromkeys((record["checkpoint"], record["partitions"]) for record in rows)
    ]
    return markdown(["cells", *(f"`{name}`, m = {m}" for name, m in columns)], lines)


TABLES: Final[Mapping[str, Callable[[Sequence[Record]], str]]] = {
    "errors": errors_table,
    "ablation": cells_table("ablation"),
    "speed": cells_table("unet-speed", "amoebanet-d-speed", "resnet101-speed"),
    "unet-memory": cells_table("unet-memory"),
    "amoebanet-d-memory": cells_table("amoebanet-d-memory"),
    "peers": peers_table,
    "peers-host": host_table,
}
"""Makes each table from predictions, or those named after the peers from their race."""


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its first column to the left and the others to the right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def rendered(text: str, folder: Path = REFERENCE) -> str:
    """``text`` with its tables as the results in ``folder`` give them.

    Raises:
        ValueError: a table that is not known, or one of those known is not there.
    """
    names = [found.group(2) for found in _BLOCK.finditer(text)]
    if sorted(names) != sorted(TABLES):
        raise ValueError(f"tables must be {', '.join(TABLES)}, each once, got {', '.join(names)}; mend the marks")
    predicted, raced = predictions(folder), races(folder)

    def table(name: str) -> str:
        return TABLES[name](raced if name.startswith("peers") else predicted)

    return _BLOCK.sub(lambda found: f"{found.group(1)}\n{table(found.group(2))}\n{found.group(3)}", text)


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


def main(arguments: Sequence[str]) -> int:
    """Write or check; exit status 2 for an unknown option."""
    if unknown := [word for word in arguments if word != "--check"]:
        print(f"option must be --check or none, got {unknown[0]}", file=sys.stderr)
        return 2
    text = README.read_text(encoding="utf-8")
    wanted = rendered(text)
    if text == wanted:
        print("README.md: its tables are those of results/reference")
        return 0
    if arguments:
        print("README.md: tables differ from results/reference; write them anew: make readme", file=sys.stderr)
        return 1
    README.write_text(wanted, encoding="utf-8")
    print("wrote the tables of README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
