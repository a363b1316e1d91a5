"""Cells and results that the tests of this folder share."""

from __future__ import annotations

from gpipe_bench.suite.cell_files import cells_text
from gpipe_bench.suite.cells import MeasuredCell
from gpipe_bench.suite.experiments.config import merged_files, parse_config
from gpipe_bench.suite.storage.raw import RawResult, cell_row

# 29 layers on two partitions: milliseconds per step.
TINY = {
    "model_args": "depth=2;B=1;C=4;size=16",
    "batch_size": 4,
    "chunks": 2,
    "partitions": 2,
    "balance": "14-15",
    "warmup": 0,
    "steps": 2,
}


def over_default(changes):
    """The default configuration as data, with changes merged into it as Snakemake merges files."""

    def merge(old, new):
        both = isinstance(old, dict) and isinstance(new, dict)
        return {**old, **{key: merge(old.get(key), value) for key, value in new.items()}} if both else new

    return merge(merged_files([])[0], changes)


def configured(**experiments):
    """The default configuration with changes of its experiments."""
    return parse_config(over_default({"experiments": experiments}))


def cell(**settings):
    return MeasuredCell.model_validate({**TINY, "transfer": "host", **settings})


def in_file(folder, *cells):
    """The options of a command that takes these cells from a file in ``folder``."""
    path = folder / "cells.json"
    path.write_text(cells_text(cells))
    return ["--cells", str(path)]


def ok_result(variant="baseline", repeat=0, throughput=10.0, **values):
    """A result as a run leaves it, with values of our choice."""
    made = cell(variant=variant)
    known = {
        "throughput_samples_per_s": throughput,
        "step_time_ms": 1e3 * made.batch_size / throughput,
        "peak_allocated_gib": 0.125,
        "utilization_fraction": 0.5,
        "bubble_fraction": 0.25,
        "copy_fraction": 0.0,
        "recompute_fraction": 0.125,
        "imbalance_fraction": 0.25,
        "device": "cpu Model X",
        "device_count": 1,
        "profile": "2x-model-x",
        "torch": "2.13.0",
        "python": "3.11.7",
        "commit": "0" * 40,
        "dirty": False,
    }
    device = {"device_index": 0, "partition": 0, "device": "cpu", "layers": 14, "peak_allocated_gib": 0.125}
    device["compute_fraction"] = 1 / 3
    step = {"step": 0, "step_time_ms": 0.1 + 0.2, "throughput_samples_per_s": throughput}
    event = {"device": "cpu", "stream": "compute", "kind": "forward", "microbatch": 0, "partition": 0}
    times = {"issue_us": 0.5, "start_us": 0.5, "end_us": 2.5, "bytes": 64}
    row = cell_row(made, repeat, **{**known, **values})
    return RawResult(made.id, row, [device], [step], [{**event, **times}], made.configuration)
