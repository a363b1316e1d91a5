"""Traces on disk: a model of the suite is traced once per PyTorch version and version of this code."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from gpipe_bench.simulator.layer_trace import TensorSpec
from gpipe_bench.simulator.model_trace import LayerFacts
from gpipe_bench.simulator.scaling import ScalableTrace, decode_trace, encode_trace
from gpipe_bench.simulator.steps import LayerTrace

__all__ = ["StoredTraces", "default_folder", "load", "read", "store", "write"]

T = TypeVar("T")

# The files of this package that decide what a trace holds and how it is stored.
_TRACING: Final = (
    "layer_trace",
    "meta_results",
    "model_trace",
    "operations",
    "optimizers",
    "recorder",
    "scaling",
    "signature",
    "sources",
    "steps",
    "trace_cache",
)


class StoredTraces:
    """All that is known of a model.

    Attributes:
        facts: of each layer.
        scalable: kinds of layers, at any size; None if they do not scale.
        layers: number of its kind for each layer, per size that was traced; the scalable one's is under 0.
        exact: size -> kinds of layers at that size.
        output: specs in the structure of the model's output, at some batch size; None if nothing was traced.
        losses: size of a mini-batch -> its loss.
    """

    def __init__(self, facts: list[LayerFacts]) -> None:
        self.facts = facts
        self.scalable: tuple[ScalableTrace, ...] | None = None
        self.layers: dict[int, tuple[int, ...]] = {}
        self.exact: dict[int, tuple[LayerTrace, ...]] = {}
        self.output: object = None
        self.losses: dict[int, LayerTrace] = {}


def default_folder() -> Path:
    """Where traces are kept: ``$XDG_CACHE_HOME/gpipe_bench/traces``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpipe_bench" / "traces"


def load(folder: Path, key: Mapping[str, Any]) -> StoredTraces | None:
    """What was stored under ``key``; None if there is nothing that can be read."""
    return read(folder, key, _decode)


def store(folder: Path, key: Mapping[str, Any], traces: StoredTraces) -> None:
    """Keep traces under ``key``, if the folder can be written."""
    write(folder, key, _encode(traces))


def read(folder: Path, key: Mapping[str, Any], decode: Callable[[Any], T]) -> T | None:
    """What ``decode`` makes of the JSON value under ``key``; None if there is nothing that can be read."""
    try:
        return decode(json.loads(_path(folder, key).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        # A cache that is missing, cut off or of another making is no cache.
        return None


def write(folder: Path, key: Mapping[str, Any], value: object) -> None:
    """Keep a JSON value under ``key``, if the folder can be written."""
    path = _path(folder, key)
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value, separators=(",", ":")), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        # Without a cache the next run traces again.
        with suppress(OSError):
            temporary.unlink()


def _path(folder: Path, key: Mapping[str, Any]) -> Path:
    text = json.dumps({**key, "torch": torch.__version__, "sources": _sources()}, sort_keys=True, default=str)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@cache
def _sources() -> str:
    """A digest of the code that traces, and of the models."""
    here = Path(__file__).parent
    models = here.parents[1] / "models"
    digest = hashlib.sha256()
    for path in (*(here / f"{name}.py" for name in _TRACING), *sorted(models.glob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _encode(traces: StoredTraces) -> dict[str, Any]:
    scalable = traces.scalable
    return {
        "facts": [
            [list(facts.parameters), facts.parameter_bytes, list(facts.others), list(facts.stashes), list(facts.pops)]
            for facts in traces.facts
        ],
        "scalable": scalable and [[encode_trace(kind.base), list(kind.slopes)] for kind in scalable],
        "layers": [[size, list(layers)] for size, layers in traces.layers.items()],
        "exact": [[size, [encode_trace(kind) for kind in kinds]] for size, kinds in traces.exact.items()],
        "output": _encode_specs(traces.output),
        "losses": [[size, encode_trace(loss)] for size, loss in traces.losses.items()],
    }


def _encode_specs(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"shape": value.shape, "stride": value.stride, "dtype": dtype, "requires_grad": value.requires_grad}
    return [_encode_specs(item) for item in value] if isinstance(value, list | tuple) else value


def _decode_specs(value: Any) -> Any:
    if isinstance(value, dict):
        dtype = getattr(torch, value["dtype"])
        return TensorSpec(tuple(value["shape"]), tuple(value["stride"]), dtype, value["requires_grad"])
    return tuple(_decode_specs(item) for item in value) if isinstance(value, list) else value


def _decode(data: dict[str, Any]) -> StoredTraces:
    traces = StoredTraces(
        [
            LayerFacts(tuple(parameters), trained, tuple(others), tuple(stashes), tuple(pops))
            for parameters, trained, others, stashes, pops in data["facts"]
        ]
    )
    if data["scalable"] is not None:
        traces.scalable = tuple(ScalableTrace(decode_trace(base), tuple(slopes)) for base, slopes in data["scalable"])
    traces.layers = {size: tuple(layers) for size, layers in data["layers"]}
    traces.exact = {size: tuple(decode_trace(kind) for kind in kinds) for size, kinds in data["exact"]}
    traces.output = _decode_specs(data["output"])
    traces.losses = {size: decode_trace(loss) for size, loss in data["losses"]}
    return traces
