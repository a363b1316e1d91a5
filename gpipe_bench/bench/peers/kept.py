"""Finished cases of a race, on disk as soon as they are there: a race that is cut off goes on where it was.

A file of JSON lines beside the table, gone when the table is written: what the race is (its key) and its facts, then a
line per case. Another race's file, of other settings, sources or machine, is put aside, never overwritten.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from gpipe_bench.bench.files import write_files
from gpipe_bench.bench.machine import Machine
from gpipe_bench.bench.peers.cases import PeerCase
from gpipe_bench.bench.peers.contenders import CONTENDERS, contenders_of
from gpipe_bench.bench.peers.race import Outcome, Raced, Visit
from gpipe_bench.bench.peers.settings import PeersSettings
from gpipe_bench.bench.sources import source_digest
from gpipe_bench.measure.host import cpu_count

__all__ = ["KeptCases", "race_key"]


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
        report: takes a line about what was found.
    """

    def __init__(self, path: Path, key: Mapping[str, Any], report: Callable[[str], None]) -> None:
        self._path = path
        self._key = dict(key)
        self.facts: dict[str, Any] = {}
        self._raced: dict[str, Raced] = {}
        head, *cases = _lines(path) or [{}]
        if head.get("key") == self._key:
            self.facts = head["facts"]
            self._raced = {one.case.id: one for one in map(_from_record, cases)}
            # without a line that was cut short, onto which the next one would be written
            write_files({path: "".join(json.dumps(record) + "\n" for record in (head, *cases))})
            report(f"going on with a race that was cut off: {len(cases)} cases are in {path}; remove it to begin anew")
        elif path.exists():
            aside = _unused(path)
            path.replace(aside)
            report(f"a race of other settings, sources or machine was cut off here; its cases are in {aside} now")

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Start the file of a race that has none."""
        self.facts = dict(facts)
        self._write({"key": self._key, "facts": self.facts}, "w")

    def get(self, case: PeerCase) -> Raced | None:
        """What came out of a case, if it is finished."""
        return self._raced.get(case.id)

    def add(self, raced: Raced) -> None:
        """Keep a finished case."""
        self._write(_to_record(raced), "a")

    def remove(self) -> None:
        """Forget all: the table is written."""
        self._path.unlink(missing_ok=True)

    def _write(self, record: Mapping[str, Any], mode: str) -> None:
        with self._path.open(mode, encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file up to the first that is not whole: the race may have been killed while it wrote."""
    found: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return found
    for line in text.splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith("\n") else None
        except json.JSONDecodeError:
            record = None
        if not isinstance(record, dict):
            break
        found.append(record)
    return found


def _unused(path: Path) -> Path:
    """A name beside ``path`` that nothing has."""
    number = 1
    while (aside := path.with_name(f"{path.stem}_{number}{path.suffix}")).exists():
        number += 1
    return aside


def _to_record(raced: Raced) -> dict[str, Any]:
    outcomes = [
        {**asdict(outcome), "contender": outcome.contender.name, "case": outcome.case.to_dict()}
        for outcome in raced.outcomes
    ]
    measured = {"alone": raced.alone, "busy": raced.busy, "one_way_s": raced.one_way_s}
    return {"case": raced.case.to_dict(), "outcomes": outcomes, **measured}


def _from_record(record: dict[str, Any]) -> Raced:
    outcomes = []
    for given in record["outcomes"]:
        visits = [Visit(**visit) for visit in given["visits"]]
        case, contender = PeerCase.from_dict(given["case"]), CONTENDERS[given["contender"]]
        outcomes.append(Outcome(**{**given, "case": case, "contender": contender, "visits": visits}))
    return Raced(**{**record, "case": PeerCase.from_dict(record["case"]), "outcomes": outcomes})
