"""Traces on disk: a model of the suite is traced once per PyTorch version and version of this code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

from gpipe_bench.cache import cache_folder
from gpipe_bench.sealed import read_sealed, write_sealed
from gpipe_bench.simulator.tracing.scaling import ScalableTrace, decode_trace, encode_trace
from gpipe_bench.simulator.tracing.steps import LayerFacts, LayerTrace, Parameter

__all__ = ["TRACING", "Shelf", "StoredTraces", "default_folder", "read", "write"]

T = TypeVar("T")

TRACING: Final = ("tracing/*.py", "workloads/optimizer*.py", "workloads/sources.py")
"""The files of the simulator that decide what a trace holds and how it is stored, as patterns."""


class StoredTraces:
    """The traces of a model; stored ones are decoded on demand.

    Args:
        facts: of each layer; not needed with ``encoded``.
        encoded: the stored form.

    Attributes:
        layers: for each layer the number of its kind among others and as the first of a partition, per size that was
            traced; the scalable one's is under 0.
        output: specs in the structure of the model's output, at some batch size; None if nothing was traced now.
        encoded_output: the same as it was stored, if it was.
    """

    def __init__(self, facts: list[LayerFacts] | None = None, encoded: Mapping[str, Any] | None = None) -> None:
        self._encoded: Mapping[str, Any] = {} if encoded is None else encoded
        if facts is not None:
            self.facts = facts
        self.layers: dict[int, tuple[tuple[int, int], ...]] = {
            size: tuple((among, first) for among, first in layers) for size, layers in self._encoded.get("layers", ())
        }
        self.output: object = None
        self.encoded_output: Any = self._encoded.get("output")

    @cached_property
    def facts(self) -> list[LayerFacts]:
        """Those of each layer."""
        return [
            LayerFacts(tuple(Parameter(*item) for item in parameters), tuple(others), tuple(stashes), tuple(pops))
            for parameters, others, stashes, pops in self._encoded["facts"]
        ]

    @cached_property
    def scalable(self) -> tuple[ScalableTrace, ...] | None:
        """Kinds of layers, at any size; None if they do not scale."""
        found = self._encoded.get("scalable")
        return found and tuple(ScalableTrace(decode_trace(base), tuple(slopes)) for base, slopes in found)

    @cached_property
    def exact(self) -> dict[int, tuple[LayerTrace, ...]]:
        """Size -> kinds of layers at that size."""
        return {size: tuple(map(decode_trace, kinds)) for size, kinds in self._encoded.get("exact", ())}


def default_folder() -> Path:
    """Where traces are kept: ``$XDG_CACHE_HOME/gpipe_bench/traces``, by default below ``~/.cache``."""
    return cache_folder("traces")


class Shelf:
    """Where the traces of one model are kept; a loss, which comes in many sizes, in a file of its own for each.

    Args:
        folder: if it can be written.
        key: names the model.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self._folder, self._key = folder, key

    def load(self) -> StoredTraces | None:
        """The traces; None if there is nothing that can be read."""
        return read(self._folder, self._key, _decode)

    def store(self, traces: StoredTraces) -> None:
        """Keep the traces."""
        write(self._folder, self._key, _encode(traces))

    def load_loss(self, size: int) -> LayerTrace | None:
        """The loss of a mini-batch of ``size`` samples; None if there is nothing that can be read."""
        return read(self._folder, {**self._key, "loss": size}, decode_trace)

    def store_loss(self, size: int, loss: LayerTrace) -> None:
        """Keep a loss."""
        write(self._folder, {**self._key, "loss": size}, encode_trace(loss))


def read(
    folder: Path, key: Mapping[str, Any], decode: Callable[[Any], T], sources: tuple[str, ...] = TRACING
) -> T | None:
    """What ``decode`` makes of the JSON value under ``key``; None if there is nothing that can be read.

    Args:
        folder: where it is kept.
        key: all that the value depends on, code aside.
        decode: makes it from JSON.
        sources: patterns of the files of the simulator that it depends on; the models are among them anyway.
    """
    kept = read_sealed(_path(folder, key, sources))
    try:
        return None if kept is None else decode(kept)
    except (ValueError, KeyError, TypeError):
        # A value of another making is none.
        return None


def write(folder: Path, key: Mapping[str, Any], value: object, sources: tuple[str, ...] = TRACING) -> None:
    """Keep a JSON value where :func:`read` finds it, if the folder can be written."""
    # Without a cache the next run traces again.
    with suppress(OSError):
        write_sealed(_path(folder, key, sources), value)


def _path(folder: Path, key: Mapping[str, Any], sources: tuple[str, ...]) -> Path:
    text = json.dumps({**key, "torch": _torch_version(), "sources": _digest(sources)}, sort_keys=True, default=str)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@cache
def _torch_version() -> str:
    """What the installed PyTorch says of itself: read, since to load even the reader of metadata takes longer."""
    found = find_spec("torch")
    path = Path(found.origin).with_name("version.py") if found is not None and found.origin is not None else None
    if path is not None and path.is_file():
        return path.read_text(encoding="utf-8")
    from importlib.metadata import version

    return version("torch")


@cache
def _digest(sources: tuple[str, ...]) -> str:
    """A digest of files of the simulator, and of the models."""
    here = Path(__file__).parents[1]
    models = here.parent / "models"
    digest = hashlib.sha256()
    found = (path for pattern in sources for path in sorted(here.glob(pattern)))
    for path in (*found, *sorted(models.glob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _encode(traces: StoredTraces) -> dict[str, Any]:
    scalable = traces.scalable
    return {
        "facts": [
            [list(facts.parameters), list(facts.others), list(facts.stashes), list(facts.pops)]
            for facts in traces.facts
        ],
        "scalable": scalable and [[encode_trace(kind.base), list(kind.slopes)] for kind in scalable],
        "layers": [[size, list(layers)] for size, layers in traces.layers.items()],
        "exact": [[size, [encode_trace(kind) for kind in kinds]] for size, kinds in traces.exact.items()],
        "output": traces.encoded_output if traces.output is None else _encode_specs(traces.output),
    }


def _encode_specs(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_encode_specs(item) for item in value]
    return value.encoded() if hasattr(value, "encoded") else value


def _decode(data: dict[str, Any]) -> StoredTraces:
    missing = {"facts", "scalable", "layers", "exact", "output"} - data.keys()
    if missing:
        raise KeyError(*missing)
    return StoredTraces(encoded=data)
