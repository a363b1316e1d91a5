"""Imports the module of a model of one's own, and turns an error in the user's code into one line.

A module is imported once for each content of its files. After an edit it is imported again, also in the same process.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from gpipe_bench.errors import ConfigError, GpipeBenchError
from gpipe_bench.models.own_files import OwnName, is_installed, own_files
from gpipe_bench.models.torchvision_repair import mend_torchvision
from gpipe_bench.util.nearest import nearest

_imported: dict[str, tuple[ModuleType | None, bytes]] = {}
"""Name of a module of the user's -> the module, and its file when it was imported here."""


def function_of(own: OwnName, digest: str) -> Any:
    """What makes the model; ``digest``: of its files, as they are now.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    module = _module(own, str(Path.cwd()), digest)
    found = getattr(module, own.function, None)
    if found is None:
        mine = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        hint = nearest(own.function, mine) if mine else "write one"
        raise ConfigError([f"model must name a function of {own.place}, got {own.function!r}; {hint}"])
    return found


def optional_function(own: OwnName, digest: str, suffix: str) -> Any:
    """The function whose name is that of the model's with ``suffix``; None if there is none."""
    return getattr(_module(own, str(Path.cwd()), digest), own.function + suffix, None)


@contextmanager
def blamed(own: OwnName, rule: str, hint: str) -> Iterator[None]:
    """Turn whatever the user's code raises into one line.

    Args:
        own: the model.
        rule: what the code must do.
        hint: what to change.

    Raises:
        ConfigError: the code raised something.
    """
    try:
        yield
    except GpipeBenchError:
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        line = line_of(own, error)
        where = f" ({line})" if line else ""
        raise ConfigError([f"model must {rule}, got {type(error).__name__}: {text[:300]}{where}; {hint}"]) from error


def line_of(own: OwnName, error: BaseException) -> str:
    """The user's last line that an exception went through, such as ``net.py, line 3``; empty if there is none."""
    if isinstance(error, SyntaxError):
        return ""  # its text says where
    files = {str(path.absolute()) for path in own_files(own).values()}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""


@lru_cache(maxsize=64)
def _module(own: OwnName, folder: str, digest: str) -> ModuleType:
    """The module, imported for these files."""
    files = {name: path.absolute() for name, path in own_files(own).items()}
    main = next(iter(files))
    mend_torchvision()
    _look_in(folder)
    if own.is_file:
        # As for a program: what lies beside it can be imported.
        _look_in(str(files.pop(main).parent))
    _forget(files)
    path = Path(own.place).absolute()
    with blamed(own, f"be in a {'file' if own.is_file else 'module'} that can be imported", f"correct {own.place}"):
        module = _run(path, f"_{path.stem}_{digest}") if own.is_file else importlib.import_module(own.place)
    _imported.update({name: (sys.modules.get(name), path.read_bytes()) for name, path in files.items()})
    return module


def _look_in(folder: str) -> None:
    """Let Python look for modules in a folder first."""
    if sys.path[:1] != [folder]:
        sys.path[:] = [folder, *(place for place in sys.path if place != folder)]


def _forget(files: Mapping[str, Path]) -> None:
    """Forget modules that were imported from another file of that name, or perhaps from this one before an edit.

    Raises:
        ConfigError: a module has the name of one of Python's or of an installed package, which is in use.
    """
    importlib.invalidate_caches()
    mine = {name: path for name, path in files.items() if name in sys.modules and not is_installed(str(path))}
    stale = False
    for name, path in mine.items():
        place = getattr(sys.modules[name], "__file__", None) or ""
        if is_installed(place):
            rule = "must import modules that have names of their own"
            raise ConfigError([f"model {rule}, got {name} in {path.name} and one that is installed; rename yours"])
        stale |= Path(place).absolute() != path or _imported.get(name) != (sys.modules[name], path.read_bytes())
    # Those that import what is stale are so, too.
    for name in mine if stale else ():
        del sys.modules[name]


def _run(path: Path, name: str) -> ModuleType:
    """The module in a file, under a name of its own; compiled now, since stored code goes by seconds."""
    spec = spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None  # noqa: S101 - a name without a loader has a specification
    module = module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))  # noqa: S102 - the user asks for it
    except BaseException:
        del sys.modules[name]
        raise
    return module
