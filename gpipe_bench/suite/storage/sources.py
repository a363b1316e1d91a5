"""Digests of source code, so that a workflow notices when the code behind a result changed.

Snakemake compares the text of a command, and ``python -m gpipe_bench …`` stays the same whatever is edited in the
package. A rule therefore carries a digest of the sources that its result depends on, found by following imports: an
edit of a figure redraws it and measures nothing anew.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

from gpipe_bench.util.imports import import_closure

PACKAGES: Final = ("gpipe_bench", "studies")
_C_SUFFIXES: Final = (".c", ".cpp", ".def", ".h")


def source_digest(*modules: str) -> str:
    """16 hexadecimal digits that change with any source file behind ``modules``.

    Args:
        modules: dotted names. A package stands for everything in it: name it where modules are loaded by name at
            run time, which no import statement shows.
    """
    digest = hashlib.sha256()
    for name, path in sorted(source_files(modules).items()):
        digest.update(f"{name}\0".encode())
        digest.update(path.read_bytes())
        if path.name == "__init__.py":
            # C and C++ code belongs to the package whose folder it is in, or a folder csrc in that.
            found = [*path.parent.iterdir(), *path.parent.glob("csrc/*")]
            for source in sorted(source for source in found if source.suffix in _C_SUFFIXES):
                digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def source_files(modules: Iterable[str]) -> dict[str, Path]:
    """Name and file of the modules in ``modules`` and of all that they import from this project, at any remove."""
    files = {name: module_file(name) for module in modules for name in _members(module)}
    return import_closure({name: path for name, path in files.items() if path}, module_file)


@cache
def module_file(name: str) -> Path | None:
    """The file of a module of this project, found without importing it; ``None`` when there is no such module."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top) if top in PACKAGES else None
    if spec is None or not spec.submodule_search_locations:
        return None
    place = Path(spec.submodule_search_locations[0], *rest)
    candidates = (place / "__init__.py", place.with_suffix(".py"))
    return next((path for path in candidates if path.is_file()), None)


def _members(module: str) -> list[str]:
    path = module_file(module)
    if path is None:
        raise ValueError(f"module must be one of this project's, got {module!r}; correct its name")
    if path.name != "__init__.py":
        return [module]
    # Links are followed: the models of a checkout lie beside the package.
    files = (Path(place, name) for place, _, names in os.walk(path.parent, followlinks=True) for name in names)
    inside = (file.relative_to(path.parent).with_suffix("").parts for file in files if file.suffix == ".py")
    return [".".join((module, *parts)).removesuffix(".__init__") for parts in inside]
