"""Runs behaviours and says what came of them: in this process, or in child processes, where one that hangs is ended."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module, util
from pathlib import Path
from typing import Any, Final, Literal

from gpipe_bench.errors import ConfigError
from gpipe_bench.judge.behaviours import BEHAVIOURS
from gpipe_bench.judge.protocol import Adapter, Behaviour, Case, Notes, Session, Setup
from gpipe_bench.schedules.table import SCHEDULES
from gpipe_bench.util.nearest import nearest, nearest_few

ENGINES: Final = (
    *("gpipe_bench", "gpipe_bench_processes", "torchgpipe", "fairscale", "pipelining", "d9d", "plain", "reference"),
)
"""Engines with an adapter in this package."""

_INSTALLED_BY: Final = {
    "torchgpipe": "pip install --no-deps torchgpipe==0.0.7",
    "fairscale": "pip install --no-deps fairscale==0.4.13",
    "d9d": "pip install d9d==0.24.0 'torch>=2.14', in an environment of its own",
}

HANGS: Final = "no answer within"

VerdictKind = Literal["ok", "limit", "wrong", "raises", "hangs"]

Run = Callable[[str, int, int, Case], tuple[Notes, str]]
"""From a behaviour, a seed, the number of a case and the case to the notes and the error that ended the script."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a behaviour.

    Attributes:
        kind: ``ok``, ``limit`` (the engine says that it does not do all of this), ``wrong``, ``raises`` or ``hangs``.
        detail: what was seen, or where the limit is documented.
        case: the first case that is not ok, or None.
        seed: of its data.
    """

    kind: VerdictKind
    detail: str = ""
    case: Case | None = None
    seed: int = 0

    @property
    def setting(self) -> str:
        """The case as words, empty without one."""
        if self.case is None:
            return ""
        setup = self.case.setup
        return f"n={setup.n} m={setup.chunks} {setup.checkpoint}"


def adapter_of(engine: str) -> Adapter:
    """The adapter of an engine.

    Args:
        engine: ``NAME`` or ``NAME:SCHEDULE``, where a name is one of :data:`ENGINES` or the path of a Python file with
            a function ``adapter(schedule)``.

    Raises:
        ConfigError: there is no such engine, its package is not installed, or the file has no such function.
    """
    name, _, schedule = engine.partition(":")
    own = schedule.partition(",")[0]
    if name.startswith("gpipe_bench") and name in ENGINES and own and own not in SCHEDULES:
        rule = f"schedule of engine {name} must be one of {', '.join(SCHEDULES)}"
        raise ConfigError([f"{rule}, got {own!r}; {nearest_few(own, SCHEDULES)}"])
    if name in ENGINES:
        place = f"gpipe_bench.judge.adapters.{name}"
        try:
            return _made(import_module(place), schedule)
        except (ImportError, KeyError, AttributeError) as error:
            rule = f"engine {engine!r} must be installed and have this schedule"
            change = _INSTALLED_BY.get(name) if isinstance(error, ImportError) else None
            change = change or "name a schedule of docs/judge.md"
            raise ConfigError([f"{rule}, got {type(error).__name__}: {error}; {change}"]) from error
    if not name.endswith(".py"):
        rule = f"engine must be one of {', '.join(ENGINES)}, or a Python file"
        raise ConfigError([f"{rule}, got {engine!r}; {nearest(name, ENGINES)}"])
    spec = util.spec_from_file_location(Path(name).stem, name)
    if spec is None or spec.loader is None or not Path(name).is_file():
        raise ConfigError([f"engine must be a file that can be read, got {name!r}; correct the path"])
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "adapter"):
        raise ConfigError([f"{name} must have a function adapter(schedule), got none; see docs/judge.md"])
    return _made(module, schedule)


def _made(module: Any, schedule: str) -> Adapter:
    made: Adapter = module.adapter(schedule)
    return made


def play(adapter: Adapter, case: Case, rank: int = 0) -> tuple[Notes, str]:
    """The notes of one process, and the error that ended its script, or an empty text."""
    notes: Notes = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            session = Session(adapter, case, rank)
            notes = session.notes
            case.script(session)
        except Exception as error:  # noqa: BLE001 - what an engine raises is its verdict
            where = traceback.extract_tb(error.__traceback__)[-1]
            line = (str(error).strip() or "no message").splitlines()[0]
            return notes, f"{type(error).__name__}: {line[:150]} ({where.name})"
    return notes, ""


def cases_of(behaviour: Behaviour, seed: int, adapter: Adapter) -> list[Case]:
    """The cases of a behaviour as an engine can run them; see :class:`gpipe_bench.judge.protocol.Adapter`."""
    fitted: Callable[[Setup], Setup] = getattr(adapter, "fitted", lambda setup: setup)
    return [replace(case, setup=fitted(case.setup)) for case in behaviour.cases(seed, adapter.per_device)]


def judge(adapter: Adapter, name: str, seed: int = 0, run: Run | None = None) -> Verdict:
    """The verdict on one behaviour: that of its first case that is not ok, or a limit if it leaves one out.

    Args:
        adapter: of the engine.
        name: of the behaviour.
        seed: of the data.
        run: how a case is run; default: in this process, which must not hang.
    """
    from gpipe_bench.judge.adapters.plain import Plain

    behaviour, limit = BEHAVIOURS[name], ""
    for index, case in enumerate(cases_of(behaviour, seed, adapter)):
        keys = (*sorted(case.needs), name, f"{name}/{case.setup.checkpoint}")
        if lacking := [adapter.limits[key] for key in keys if key in adapter.limits]:
            limit = limit or lacking[0]
            continue
        plain, _ = play(Plain(), case)
        got, error = run(name, seed, index, case) if run else play(adapter, case)
        kind, detail = _verdict(behaviour, case, plain, got, error)
        if kind != "ok":
            return Verdict(kind, detail, case, seed)
    return Verdict("limit" if limit else "ok", limit, None, seed)


def _verdict(behaviour: Behaviour, case: Case, plain: Notes, got: Notes, error: str) -> tuple[VerdictKind, str]:
    if error.startswith((HANGS, "Stuck")):
        return "hangs", error
    if error and not behaviour.raises:
        return "raises", error
    found = behaviour.check(case, plain, got)
    return ("wrong", found) if found else ("ok", "")


def judged(engine: str, names: Iterable[str], seed: int = 0, limit_s: float = 20.0) -> Iterator[tuple[str, Verdict]]:
    """The verdict on each behaviour, in child processes.

    Args:
        engine: see :func:`adapter_of`.
        names: of behaviours.
        seed: of the data.
        limit_s: seconds until a case counts as hanging.

    Yields:
        The name of a behaviour and its verdict.
    """
    from gpipe_bench.judge.children import Children

    adapter = adapter_of(engine)
    with Children(engine, processes=adapter.processes, limit_s=limit_s) as children:
        for name in names:
            yield name, judge(adapter, name, seed, children.run)
