"""Finished cases of a race, kept like the parts of any other job, and what tells one race from another.

A race takes long: the file of another one, of other settings, sources or machine, is put aside, never overwritten.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from gpipe_bench.bench.peers.cases import PeerCase
from gpipe_bench.bench.peers.contenders import contenders_of
from gpipe_bench.bench.peers.race import Raced
from gpipe_bench.bench.peers.settings import PeersSettings
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.bench.storage.kept import KeptParts
from gpipe_bench.bench.storage.sources import source_digest
from gpipe_bench.measure.host import cpu_count

_RACED: Final = TypeAdapter(Raced)
_FACTS: Final = "facts"
"""Name of the first part; no case has it."""


def race_key(settings: PeersSettings, machine: Machine) -> dict[str, Any]:
    """What tells one race from another: settings, sources, packages and machine."""
    packages = ("torch", *{contender.package for contender in contenders_of(settings.contenders)})
    return {
        "config_sha256": settings.config_sha256,
        "sources": source_digest("gpipe_bench.bench.peers"),
        "packages": {name: _version(name) for name in sorted(set(packages))},
        "machine": [platform.node(), platform.python_version(), machine.device, machine.count, cpu_count()],
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


class KeptCases:
    """Finished cases of one race.

    Args:
        path: the file.
        key: what must agree for cases to belong to one race.
        report: takes a line about the cases found.
    """

    def __init__(self, path: Path, key: Mapping[str, Any], report: Callable[[str], None]) -> None:
        self._kept = KeptParts(path, dict(key))
        self.facts: dict[str, Any] = self._kept.get(_FACTS) or {}
        if self._kept.found:
            # the first part are the facts
            cases = max(0, len(self._kept) - 1)
            report(f"going on with a race that was cut off: {cases} cases are in {path}; remove it to begin anew")
        elif path.exists():
            aside = _unused(path)
            path.replace(aside)
            report(f"a race of other settings, sources or machine was cut off here; its cases are in {aside} now")

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Start a race that has no cases yet."""
        self.facts = dict(facts)
        self._kept.add(_FACTS, self.facts)

    def get(self, case: PeerCase) -> Raced | None:
        """What came out of a case, if it is finished."""
        record = self._kept.get(case.id)
        return None if record is None else _RACED.validate_python(record)

    def add(self, raced: Raced) -> None:
        """Keep a finished case."""
        self._kept.add(raced.case.id, asdict(raced))

    def remove(self) -> None:
        """Forget all: the table is written."""
        self._kept.remove()


def _unused(path: Path) -> Path:
    """A name beside ``path`` that nothing has."""
    number = 1
    while (aside := path.with_name(f"{path.stem}_{number}{path.suffix}")).exists():
        number += 1
    return aside
