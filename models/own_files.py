"""Models of one's own by name, and the files that decide what they are.

    path/to/file.py:function       package.module:function

The files of a model are the named file and every module that it imports, directly or not; installed packages are left
out. A digest of these files differs after an edit, so that no result of the old code is taken for one of the new code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sysconfig
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from gpipe_bench.errors import ConfigError
from gpipe_bench.util.imports import import_closure

_INSTALLED: Final = ("site-packages", "dist-packages")
_OURS: Final = "gpipe_bench"


class OwnName(NamedTuple):
    """The name of a model of one's own.

    Attributes:
        place: path of a file, or dotted name of a module.
        function: that makes the model.
    """

    place: str
    function: str

    @property
    def is_file(self) -> bool:
        """Whether the place is a path, as opposed to the name of a module."""
        return self.place.endswith(".py") or "/" in self.place or os.sep in self.place

    def __str__(self) -> str:
        return f"{self.place}:{self.function}"


def split_name(name: object) -> OwnName | None:
    """The parts of ``place:function``; None for a name of another form."""
    place, colon, function = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    return OwnName(place.strip(), function.strip()) if colon else None


def portable(name: str) -> str:
    """The same name for the same file: a path below the current folder counts from there, written with ``/``."""
    own = split_name(name)
    if own is None or not own.is_file:
        return name
    path = Path(own.place)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{Path(os.path.normpath(path)).as_posix()}:{own.function}"


def own_digest(own: OwnName) -> str:
    """16 hexadecimal digits that change with any file of the model.

    Raises:
        ConfigError: there is no such file or module, or it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for name, path in sorted(own_files(own).items()):
            digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    except OSError as error:
        raise ConfigError(
            [f"model must be in files that can be read, got {error}; change their permissions"]
        ) from error
    return digest.hexdigest()[:16]


def own_files(own: OwnName) -> dict[str, Path]:
    """Name of module -> file, for the named module, which comes first, and all that it imports but what is installed.

    Raises:
        ConfigError: there is no such file or module.
    """
    main = Path(own.place) if own.is_file else _find(own.place, (Path.cwd(),), own.place)
    if main is None or not main.is_file():
        kind, hint = (
            ("file", "correct the path, which counts from the current folder")
            if own.is_file
            else ("module", "correct its name, or start where Python finds it")
        )
        raise ConfigError([f"model must be in a {kind} that exists, got {str(own)!r}; {hint}"])
    folders = (main.parent, Path.cwd()) if own.is_file else (Path.cwd(),)
    first = main.stem if own.is_file else own.place
    return import_closure({first: main}, cache(lambda name: _find(name, folders, own.place)))


def _find(name: str, folders: tuple[Path, ...], named: str) -> Path | None:
    """The file of a module: below one of ``folders``, or wherever Python finds what is not installed.

    Args:
        name: dotted.
        folders: where to look first.
        named: the module that the model is in, which may be installed.
    """
    top, *rest = name.split(".")
    if top == _OURS or not all(part.isidentifier() for part in (top, *rest)):
        return None
    for folder in folders:
        if (folder / top).is_dir() or (folder / f"{top}.py").is_file():
            return _below(folder, [top, *rest])
    try:
        spec = importlib.util.find_spec(top)
    except (ValueError, ImportError):
        return None
    origins = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec is not None else []
    if not origins or (is_installed(origins[0] or origins[-1]) and top != named.partition(".")[0]):
        return None
    return _below(Path(origins[0]).parent, [top, *rest])


def _below(folder: Path, parts: list[str]) -> Path | None:
    place = folder.joinpath(*parts)
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((path for path in files if path.is_file()), None)


def is_installed(path: str) -> bool:
    """Whether a file belongs to Python or to an installed package, and is nobody's to edit."""
    parts = Path(path).parts
    return not parts or any(name in parts for name in _INSTALLED) or Path(path).is_relative_to(_standard())


@cache
def _standard() -> Path:
    """The folder of Python's own modules."""
    return Path(sysconfig.get_path("stdlib"))
