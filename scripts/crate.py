"""Write ``results/reference/ro-crate-metadata.json``: the data package as an RO-Crate, for archives that read those.

    python -m scripts.crate [FOLDER]

Everything in it comes from ``datapackage.json`` beside it and from ``CITATION.cff``, so the same files give the same
bytes. The library RO-Crate (https://www.researchobject.org/ro-crate) writes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import yaml
from rocrate.model.contextentity import ContextEntity
from rocrate.rocrate import ROCrate

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.results.tables import DESCRIPTOR

CITATION: Final = Path(__file__).resolve().parent.parent / "CITATION.cff"
CRATE: Final = "ro-crate-metadata.json"
_STANDARD: Final = "https://specs.frictionlessdata.io/data-package/"


def crate_of(folder: Path) -> ROCrate:
    """The crate of a folder that has a data package: a file for each table, with its size and digest."""
    described = json.loads((folder / DESCRIPTOR).read_text(encoding="utf-8"))
    crate = ROCrate()
    root = crate.root_dataset
    for name, key in (("name", "title"), ("description", "description"), ("version", "version")):
        root[name] = described[key]
    root["keywords"] = ", ".join(described["keywords"])
    crate.datePublished = datetime.fromisoformat(yaml.safe_load(CITATION.read_text(encoding="utf-8"))["date-released"])
    root["author"], root["license"], *papers = (
        crate.add(ContextEntity(crate, name, properties=words)) for name, words in _entities(described)
    )
    root["isBasedOn"] = papers
    words = {"name": "columns, types, units and keys", "encodingFormat": "application/json", "conformsTo": _STANDARD}
    crate.add_file(folder / DESCRIPTOR, DESCRIPTOR, properties=words)
    for resource in described["resources"]:
        words = {
            "name": resource["title"],
            "description": resource["description"],
            "encodingFormat": resource["mediatype"],
            "contentSize": str(resource["bytes"]),
            "sha256": resource["hash"].removeprefix("sha256:"),
        }
        crate.add_file(folder / resource["path"], resource["path"], properties=words)
    return crate


def _entities(described: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """What the data are by, under and from: address and properties."""
    yield "#authors", {"@type": "Organization", "name": described["contributors"][0]["title"]}
    (licence,) = described["licenses"]
    yield licence["path"], {"@type": "CreativeWork", "name": licence["title"]}
    for paper in described["sources"]:
        yield paper["path"], {"@type": "ScholarlyArticle", "name": paper["title"]}


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else REFERENCE_FOLDER
    crate_of(target).metadata.write(target)
    print(f"wrote {target / CRATE}")
