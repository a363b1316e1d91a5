"""Checkouts in temporary folders, and Snakemake run in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "Snakefile",
    "config",
    "profiles",
    "workflow",
    "gpipe_bench",
    "models",
    "studies",
    "results/reference",
)
MODEL = "depth=1;B=1;C=2;size=4"
WAY = {"model_args": MODEL, "batch_size": 2, "chunks": 2, "balance": "8-9"}
FEW = ["baseline", "dep-str-ptl"]
ONCE = {"warmup": 0, "steps": 1, "repeats": 1}
# The smallest run with everything in it: a variant that runs, one that a CPU cannot run, both loops and a schedule;
# a complete factorial in virtual time, two variants of it emulated; sweeps of a few cells.
TINY = {
    "device": "cpu",
    "experiments": {
        "ablation": {
            "cpu": {
                **ONCE,
                "model_args": MODEL,
                "batch_size": 2,
                "each": [
                    {"balance": "8-9", "chunks": 2, "variant": FEW},
                    {"balance": "whole", "chunks": [1, 2]},
                    {"balance": "8-9", "chunks": 2, "schedule": "1f1b"},
                ],
            },
            "simulated": {**WAY, "flavour": "published"},
            "emulated": {**WAY, "variant": FEW},
            "twins": {"run": "simulated", "model": "unet", **WAY, "variant": FEW, "timelines": True},
        },
        **{
            f"sweep_{name}": {
                "simulated": {
                    "model": "unet",
                    "model_args": MODEL,
                    "partitions": [1, 2],
                    "chunks": [1, 2],
                    "each": [{"batch_size": 4}, {"microbatch_size": 8}],
                },
                "emulated": None,
            }
            for name in ("amoebanet-d", "unet", "vit")
        },
        "sweep_measured": {
            "cpu": {**ONCE, "model_args": MODEL, "balance": "8-9", "chunks": [1, 2], "each": [{"batch_size": 2}]},
            "cpu_pipelines": None,
        },
    },
}
Snakemake = Callable[..., "subprocess.CompletedProcess[str]"]


def snakemake_in(place: Path) -> Snakemake:
    """Runs Snakemake on the checkout in ``place``; stdout and stderr come back together."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "snakemake", "--cores", "2", *arguments]
        given = {**os.environ, "COLUMNS": "200", **environment}
        return subprocess.run(
            command, cwd=place, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )

    return run


def checkout(place: Path) -> Path:
    """The parts of the repository that a run needs, and the tiny configuration, in ``place``."""
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, place / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, place / part)
    (place / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return place
