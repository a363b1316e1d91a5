"""The names that other projects rely on, all of them and no others."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

EXPORTS = {
    "gpipe_bench": [
        "Components",
        "GPipe",
        "GpipeBenchError",
        "LocalValue",
        "MicroBatches",
        "NoChunk",
        "Pipe",
        "PipeSequential",
        "WithDevice",
        "__version__",
        "is_checkpointing",
        "is_recomputing",
        "partition_model",
        "renamed_state_dict",
    ],
    "gpipe_bench.skip": ["Namespace", "Skippable", "isolate", "peek", "pop", "skippable", "stash", "verify_skippables"],
    "gpipe_bench.balance": [
        "balance_by_simulation",
        "balance_by_size",
        "balance_by_time",
        "layer_simulated_times",
        "layer_sizes",
        "layer_times",
        "measure_layers",
        "split_min_max",
    ],
    "gpipe_bench.models": ["MODELS", "cut_network", "from_original", "original", "to_original"],
    "gpipe_bench.components": ["Components", "PUBLISHED"],
    "gpipe_bench.results.rows": ["EVIDENCE", "PeerRow", "Record", "Row", "SCHEMA_VERSION", "STATUSES"],
    "gpipe_bench.schedules.cycles": [
        "CHECKPOINT_MODES",
        "Cycle",
        "Task",
        "checkpoint_stop",
        "clock_cycles",
        "ideal_bubble",
        "microbatch_major",
    ],
    "gpipe_bench.emulator": ["emulate", "prepare"],
    "gpipe_bench.simulator": [
        *("DeviceUse", "MeasuredLayer", "Model", "Step", "read_layers", "simulate", "write_layers"),
    ],
}


@pytest.mark.parametrize("name", EXPORTS)
def test_exports(name):
    module = importlib.import_module(name)
    assert sorted(module.__all__) == EXPORTS[name]
    assert [export for export in module.__all__ if not hasattr(module, export)] == []
    assert set(module.__all__) <= set(dir(module))


def test_every_module_says_what_it_exports_truly():
    from gpipe_bench.suite.storage.sources import PACKAGES, source_files

    wrong = []
    for name in source_files(PACKAGES):
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(name)
        wrong += [f"{name}.{export}" for export in getattr(module, "__all__", ()) if not hasattr(module, export)]
    assert wrong == []


def test_an_unknown_name_is_an_attribute_error():
    import gpipe_bench

    with pytest.raises(AttributeError, match="module 'gpipe_bench' has no attribute 'Gpipe'"):
        _ = gpipe_bench.Gpipe


def test_import_is_light():
    program = "import sys, gpipe_bench; print(sorted({'torch', 'numpy', 'pandas', 'matplotlib'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
