"""Seeds of everything that can go wrong between processes, and faults of the engine that they find."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest

from gpipe_bench.distributed import agreement, connections, exchange, links, pipe
from gpipe_bench.distributed.data_parallel import Replicas
from gpipe_bench.distributed.exchange import Exchange
from gpipe_bench.distributed.failures import FailureChannel
from gpipe_bench.engine import batchnorm
from tests.cover import EVERY_CASE
from tests.distributed.seeded import DIFFERENCES, OF_REPLICAS, Case
from tests.distributed.seeds import Trial, main, outcomes, prepare, run
from tests.distributed.seeds_checks import check

SEEDS = int(os.environ.get("SEEDS", "2000" if EVERY_CASE else "150"))
WITHIN = 1000
"""So many seeds find each fault, at the most."""


def chosen() -> list[int]:
    """The first seeds, and four that draw each thing in which ranks can differ."""
    named: dict[str, list[int]] = {}
    for seed in range(2000):
        for each in Case(seed).failures:
            if each.kind == "difference":
                named.setdefault(each.name, []).append(seed)
    assert named.keys() == {*DIFFERENCES, *OF_REPLICAS}
    return sorted({*range(SEEDS), *(seed for seeds in named.values() for seed in seeds[:4])})


def test_nothing_hangs_and_nothing_differs():
    assert [f"seed {outcome.seed}: {outcome.wrong}" for outcome in outcomes(chosen()) if outcome.wrong] == []


def test_a_seed_repeats_exactly():
    """Also in another process, in which sets have another order."""
    seeds, root = [3, 11, 20, 24], Path(__file__).parents[2]
    prepare()
    here = [run(seed).digest for seed in seeds]
    assert here == [run(seed).digest for seed in seeds]
    assert len({*here}) == len(seeds)
    program = f"from tests.distributed.seeds import run\nfor seed in {seeds}: print(run(seed).digest)"
    options: Any = {"cwd": root, "env": {**os.environ, "PYTHONHASHSEED": "7"}, "text": True}
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, **options)
    assert there.stdout.split() == here


def test_the_command_prints_a_line_to_paste(monkeypatch, capsys):
    plant(monkeypatch, FAULTS["gradients of replicas are summed up"])
    assert main(["--seeds", "0:40"]) == 1
    line, *_ = capsys.readouterr().out.splitlines()
    assert line.startswith("python -m tests.distributed.seeds --seed ")
    assert main([*line.partition("#")[0].split()[3:], "--log"]) == 1
    assert "differs" in capsys.readouterr().out


class Fault(NamedTuple):
    """A piece of the source of a function, and what stands there instead; which cases may show it."""

    owner: Any
    name: str
    old: str
    new: str
    shown_by: Callable[[Case], object] = lambda case: True


def differs(case: Case) -> bool:
    return any(each.kind == "difference" for each in case.failures)


def differs_in(name: str) -> Callable[[Case], object]:
    return lambda case: any(each.name == name for each in case.failures)


def tells_replicas(case: Case) -> bool:
    """A rank fails and ends, while one that it works with stays, and other replicas may wait for this one."""
    return len(case.grid) > 1 and any(
        each.kind in ("exception", "interrupt")
        and not case.again
        and not case.lingers[each.rank]
        and any(case.lingers[rank] for rank in case.grid[case.place(each.rank)[0]])
        for each in case.failures
    )


def ties(case: Case) -> object:
    return case.ties


def norms(case: Case) -> object:
    return case.norms and case.deferred


def strange(case: Case) -> object:
    return case.strange and len(case.grid) > 1


def checkpoints(case: Case) -> object:
    return case.saved_after is not None and case.ties


_CLIP = "exchange.replicated(lambda replicas: replicas.agree(call))"
FAULTS = {
    "tensors of a message in the wrong order": Fault(links.Link, "send", "in pieces])", "in pieces[::-1]])"),
    "calls are not compared": Fault(agreement.Begin, "agree", "compare([told", "(lambda *_: None)([told", differs),
    "replicas are not compared": Fault(Replicas, "agree", "compare([found", "(lambda *_: None)([found", differs),
    "no time-out": Fault(connections, "own_groups", "timedelta(seconds=timeout_s)", "timedelta(days=99)"),
    "a failed pipeline runs on": Fault(pipe.Pipe, "_together", "self.failure = exchange.failure", "pass"),
    "a tied gradient is summed up twice": Fault(exchange, "summed", "sum(there[1:], there[0])", "sum(there, there[0])"),
    "a tied weight counts twice in the norm": Fault(pipe.Pipe, "_counted_once", "if parameter not in before", "", ties),
    "the wrong rank is named": Fault(FailureChannel, "__init__", "ranks[group.rank()]", "group.rank()"),
    "the cause is not told": Fault(Exchange, "give_up", "self._failures.tell(reason)", "pass"),
    "connections stay open": Fault(Exchange, "give_up", "self._links.close()", "pass"),
    "those to replicas stay open": Fault(Exchange, "give_up", "self._replicas.close()", "pass", tells_replicas),
    "gradients of replicas are summed up": Fault(Replicas, "average", "flat /= self._group.size()", "pass"),
    "gradients are averaged early": Fault(Replicas, "done", "not self._left[action.j]", "self._left[action.j] == 1"),
    "an error is swallowed": Fault(Replicas, "_wait", "raise LostError(error) from None", "pass"),
    "a posted receive is forgotten": Fault(links._Expected, "begin", "self.next or self", "self", ties),
    "only the last rank knows the loss": Fault(Exchange, "leave", "told[self._ranks[-1]][0]", "loss"),
    "a skip has its last reader's gradient": Fault(Exchange, "_source", "chain[chain.index(j) + 1]", "chain[-1]"),
    "gradients do not accumulate": Fault(pipe.Pipe, "step", "pipeline, last =", "self.zero_grad(); pipeline, last ="),
    "an output in no process": Fault(pipe.Pipe, "_begun", "if self.rank != self._pipeline.ranks[-1]", "if True"),
    "weights without values stay so": Fault(pipe, "own_partitions", "materialise(each)", "pass"),
    "tied weights without values become two": Fault(pipe, "_given_memory", "if tensor not in made", "if True", ties),
    "replicas clip otherwise": Fault(pipe.Pipe, "clip_grad_norm_", _CLIP, "pass", differs_in("max_norm")),
    "replicas keep their weights": Fault(Replicas, "copy", "chain(module", "() and chain(module", strange),
    "replicas keep their statistics": Fault(Replicas, "copy", ", module.named_buffers()", "", strange),
    "statistics of one micro-batch": Fault(batchnorm.DeferredBatchNorm, "commit", "[call::calls]", "[-1:]", norms),
    "statistics of a recomputation": Fault(batchnorm, "is_recomputing", "return", "return False and", norms),
    "a checkpoint has other names": Fault(pipe, "stand_ins", "if tie.parameter", "if 0 and tie", checkpoints),
    "ways to normalize are not compared": Fault(pipe, "description", ": deferred,", ": True,", differs_in("deferred")),
}  # fmt: skip
COMPARED = {
    "chunks": (pipe.Pipe, "_settings", '"chunks": self.chunks,'),
    "checkpoint": (pipe.Pipe, "_settings", '"checkpoint": self.checkpoint,'),
    "mode": (pipe.Pipe, "_settings", '"training mode": self.training,'),
    "grad mode": (pipe.Pipe, "_settings", '"grad mode": torch.is_grad_enabled(),'),
    "max_norm": (pipe.Pipe, "clip_grad_norm_", ', "max_norm": max_norm'),
    "rows": (pipe.Pipe, "step", '"rows": [*begin.sizes], '),
    "evaluation": (pipe.Pipe, "step", ', "calls of pipe(x) before this step": evaluations'),
    "reduction": (pipe.Pipe, "step", 'settings["reduction"] = '),
    "freezes": (Replicas, "begin", '"parameters": parameters, '),
    "part": (Replicas, "begin", '"modes of layers": modes, '),
    "gradients": (Replicas, "begin", ', "gradients before this step": sorted(kept)'),
}
"""For each thing in which ranks may differ the piece of source that compares it."""
FAULTS |= {f"{name} is not compared": Fault(*place, "", differs_in(name)) for name, place in COMPARED.items()}


def plant(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Put the function with the fault in the place of the right one."""
    right: FunctionType = inspect.unwrap(getattr(fault.owner, fault.name))
    source = textwrap.dedent(inspect.getsource(right))
    assert source.count(fault.old) == 1, f"{fault.old} in {fault.name}"
    # Under the names of its own module.
    names: dict[str, Any] = {}
    wrong = compile("from __future__ import annotations\n" + source.replace(fault.old, fault.new), "fault", "exec")
    exec(wrong, right.__globals__ | {}, names)
    monkeypatch.setattr(fault.owner, fault.name, names[fault.name])


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, monkeypatch):
    plant(monkeypatch, FAULTS[name])
    prepare()
    seeds = (seed for seed in range(WITHIN) if FAULTS[name].shown_by(Case(seed)))
    found = next((seed for seed in seeds if check(Trial(seed))), None)
    assert found is not None
    # The seed finds the fault, and nothing else.
    monkeypatch.undo()
    assert check(Trial(found)) == []
