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
    "workflows",
    "gpipe_bench",
    "models",
    "studies",
    "results/reference",
)
MODEL = "depth=1;B=1;C=2;size=4"
# The smallest run with everything in it: a variant that runs, one that a CPU cannot run, both loops and a schedule;
# a complete factorial in virtual time, two variants of it emulated; sweeps of a few cells.
TINY = {
    "device": "cpu",
    "ablation": {
        "cpu": {
            "model_args": MODEL,
            "batch_size": 2,
            "chunks": 2,
            "partitions": 2,
            "balance": "8-9",
            "warmup": 0,
            "steps": 1,
            "repeats": 1,
            "variants": ["baseline", "dep-str-ptl"],
            "schedules": ["1f1b"],
        },
        "simulated": {
            "model_args": MODEL,
            "batch_size": 2,
            "chunks": 2,
            "partitions": 2,
            "balance": "8-9",
        },
        "emulated": {
            "model_args": MODEL,
            "batch_size": 2,
            "chunks": 2,
            "partitions": 2,
            "balance": "8-9",
            "variants": ["baseline", "dep-str-ptl"],
        },
    },
    "sweep": {
        "simulated": {
            name: {"model": "unet", "model_args": MODEL, "partitions": [1, 2], "chunks": [1, 2], "batch_size": 4}
            for name in ("amoebanet-d", "unet", "vit")
        },
        "measured": {
            "cpu": {
                "model_args": MODEL,
                "balances": ["8-9"],
                "chunks": [1, 2],
                "batch_size": 2,
                "warmup": 0,
                "steps": 1,
                "repeats": 1,
            }
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
