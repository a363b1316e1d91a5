"""Costs of layers on disk, so that a model is measured once per device and shape of its batches.

The name of a file is a digest of the model's fingerprint, see :mod:`gpipe_bench.balance.fingerprint`, and of everything
else that the costs depend on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from gpipe_bench import __version__
from gpipe_bench.balance.fingerprint import fingerprint, plain_form
from gpipe_bench.util.cache import cache_folder
from gpipe_bench.util.sealed import read_sealed, write_sealed


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/gpipe_bench/balance``, by default below ``~/.cache``."""
    return cache_folder("balance")


def kept_costs(
    folder: str | Path | None,
    module: nn.Sequential,
    sample: object,
    question: Mapping[str, object],
    measure: Callable[[], list[float]],
) -> list[float]:
    """The costs in the folder, or those that ``measure`` gives, which are then stored.

    Args:
        folder: folder of stored costs; None to measure and store nothing.
        module: the model.
        sample: what enters its first layer. Shapes and types of tensors count, their values do not.
        question: everything else that the costs depend on, as plain data.
        measure: gives a cost per layer.
    """
    if folder is None:
        return measure()
    print_of_model, inputs = fingerprint(module), plain_form(sample)
    if print_of_model is None or inputs is None:
        return measure()
    key = [print_of_model, inputs, dict(question), torch.__version__, __version__]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    path = Path(folder) / f"{name}.json"
    kept = read_sealed(path)
    if kept is not None:
        return [float(cost) for cost in json.loads(kept)]
    costs = measure()
    with suppress(OSError):
        write_sealed(path, json.dumps(costs).encode())
    return costs


def device_name(device: torch.device) -> str:
    """The name of the device model, and the settings that decide how fast it is."""
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"
    module = torch.get_device_module(device)
    tf32 = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    return f"{module.get_device_name(device)} tf32 {tf32}"
