"""``datapackage.json``: what lies in a folder of results, written from the files themselves.

The descriptor follows the Data Package standard (https://datapackage.org), version 1, which every Frictionless tool
reads. It holds no date and no path of a machine, so the same files always give the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench import __version__
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.catalogue import COMPANION_SUFFIXES
from gpipe_bench.results.schema import CONFIGURATIONS_BESIDE, OF_RUNS, ROWS_BESIDE, Table, table_of
from gpipe_bench.results.tables import DESCRIPTOR, read_text
from gpipe_bench.util.files import json_text, write_files

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DESCRIPTOR", "describe_folder", "table_schema", "write_descriptor"]


_PAPERS: Final = (
    {
        "title": "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models",
        "path": "arxiv.org/abs/2004.09910",
    },
    {
        "title": "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
        "path": "arxiv.org/abs/1811.06965",
    },
    {"title": "Zero Bubble Pipeline Parallelism", "path": "arxiv.org/abs/2401.10241"},
    {"title": "LiBai, benchmarks", "path": "github.com/Oneflow-Inc/libai"},
    {"title": "nanotron, benchmark summary", "path": "github.com/huggingface/nanotron"},
    {"title": "llm-foundry, benchmarks of training MPT", "path": "github.com/mosaicml/llm-foundry"},
)
_EVIDENCE: Final = {
    "published": "printed by others",
    "simulated": "virtual time: no device ran it",
    "emulated": "virtual time: the engine itself on virtual devices",
    "measured": "measured on real devices",
}
_PROVENANCE: Final = ("profile", "device", "torch", "cuda", "driver", "python", "commit", "dirty", "config_sha256")
_NAMED_AT_MOST: Final = 8


def describe_folder(folder: Path) -> dict[str, Any]:
    """The descriptor of all tables below ``folder``.

    Raises:
        ConfigError: no table there, or tables that cannot be read or are of no known kind; all of them.
    """
    paths = sorted(folder.rglob("*.csv"))
    if not paths:
        raise ConfigError([f"folder must hold CSV tables, got none in {folder}; collect results into it first"])
    places = [path.relative_to(folder) for path in paths]
    resources: list[dict[str, Any]] = []
    problems: list[str] = []
    for place in places:
        try:
            resources.append(_resource(folder, place, places))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return {
        "profile": "tabular-data-package",
        "name": "gpipe-bench-reference",
        "title": "Reference results of gpipe_bench: pipeline-parallel training, part by part",
        "description": "Values of one set of cells, published, simulated, emulated and measured; every row says which.",
        "version": __version__,
        "licenses": [
            {"name": "BSD-3-Clause", "path": "https://opensource.org/license/bsd-3-clause", "title": "BSD 3-Clause"}
        ],
        "contributors": [{"title": "The gpipe_bench authors", "role": "author"}],
        "keywords": ["pipeline parallelism", "GPipe", "PyTorch", "benchmark", "ablation"],
        "sources": _papers(),
        "resources": resources,
    }


def write_descriptor(folder: Path) -> Path:
    """Write the descriptor of ``folder`` into it.

    Raises:
        ConfigError: see :func:`describe_folder`.
        OutputError: it cannot be written.
    """
    path = folder / DESCRIPTOR
    write_files({path: json_text(describe_folder(folder))})
    return path


def _resource(folder: Path, place: Path, places: Collection[Path]) -> dict[str, Any]:
    path = folder / place
    table = read_text(path, listed=False)
    content = path.read_bytes()
    kind = table_of(list(table.columns), path)
    evidence = place.parts[0] if len(place.parts) > 1 and place.parts[0] in _EVIDENCE else ""
    return {
        "profile": "tabular-data-resource",
        "name": _name(place),
        "path": place.as_posix(),
        "title": _title(kind, place, evidence),
        "description": f"One line is {kind.line}; {_EVIDENCE[evidence]}." if evidence else f"One line is {kind.line}.",
        "scheme": "file",
        "format": "csv",
        "mediatype": "text/csv",
        "encoding": "utf-8",
        "dialect": {"delimiter": ",", "lineTerminator": "\n"},
        "hash": f"sha256:{hashlib.sha256(content).hexdigest()}",
        "bytes": len(content),
        "sources": _sources(evidence, place),
        "provenance": _provenance(table),
        "schema": {**table_schema(kind), **_keys(kind, place, places)},
    }


def _name(place: Path) -> str:
    return "-".join(place.with_suffix("").parts).lower()


def _keys(kind: Table, place: Path, places: Collection[Path]) -> dict[str, Any]:
    """What no two lines share, and which columns lead to lines of other tables of the package.

    Raises:
        ConfigError: a companion without the table of rows that its lines lead to, or rows without their configurations.
    """
    # A published row is of no cell and has no configuration: nobody ran it here.
    if kind.name in OF_RUNS and place.parts[0] == "published":
        return {}
    links = []
    for link in kind.links:
        target = _target(place, link.table)
        if target in places:
            reference = {"resource": _name(target), "fields": list(link.others)}
            links.append({"fields": list(link.columns), "reference": reference})
        elif link.table == ROWS_BESIDE:
            raise ConfigError([f"companion must lie beside its rows, got {place} without {target.name}; take it again"])
        elif link.table == CONFIGURATIONS_BESIDE:
            rule = "table must lie beside its configurations"
            raise ConfigError([f"{rule}, got {place} without {target.name}; make it anew, and take it again"])
    found: dict[str, Any] = {"primaryKey": list(kind.key)} if kind.key else {}
    return {**found, "foreignKeys": links} if links else found


def _target(place: Path, link: str) -> Path:
    """The table that a link of the one at ``place`` leads to."""
    if link not in (ROWS_BESIDE, CONFIGURATIONS_BESIDE):
        return Path(link)
    # The rows that a companion belongs to: ablation_steps.csv -> ablation.csv.
    suffix = next((end for end in COMPANION_SUFFIXES if place.stem.endswith(end)), "")
    return place.with_name(f"{place.stem.removesuffix(suffix)}{link}{place.suffix}")


def _title(kind: Table, place: Path, evidence: str) -> str:
    if not evidence or kind.name in ("published", "settings"):
        return f"{kind.title} of {place.stem}" if not evidence else kind.title
    where = f" on {place.parts[1]}" if len(place.parts) > 2 else ""
    whose = "" if place.stem == kind.name else f" of {place.stem}"
    return f"{kind.title}{whose}{where}, {evidence}"


def _sources(evidence: str, place: Path) -> list[dict[str, str]]:
    if evidence == "published":
        return _papers()
    if evidence == "simulated":
        return [{"title": f"simulator of gpipe_bench on the hardware profile {place.parts[1]}"}]
    return [{"title": "gpipe_bench, run as the columns of provenance say"}]


def _papers() -> list[dict[str, str]]:
    return [{"title": paper["title"], "path": f"https://{paper['path']}"} for paper in _PAPERS]


def _provenance(table: pd.DataFrame) -> Mapping[str, Any]:
    """How many lines there are, and the values of the columns that describe the run; of many values their number."""
    found: dict[str, Any] = {"rows": len(table)}
    for name in _PROVENANCE:
        values = sorted({*table[name].unique()} - {""}) if name in table else []
        if values:
            found[name] = values if len(values) <= _NAMED_AT_MOST else f"{len(values)} different"
    return found


def table_schema(kind: Table) -> dict[str, Any]:
    """The Frictionless table schema of a kind: a field per column, and missing values."""
    return {"fields": list(kind.fields.values()), "missingValues": [""]}
