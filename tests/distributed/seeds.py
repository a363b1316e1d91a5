"""Everything that can go wrong between processes, from one seed: ``python -m tests.distributed.seeds --seeds 0:200``.

Each seed draws ranks, a model, a schedule, some calls, how long everything takes, and what fails and when. The real
engine then runs in a :class:`tests.distributed.virtual.World`, where nothing depends on this machine. Without a failure
all ranks must find what the plain module gives, bit for bit; with one all must end in time, and name the rank. A seed
for which this does not hold is a line to paste, and ``--log`` shows what happened, the same each time.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from math import inf
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from gpipe_bench.distributed import PeerError, Pipe
from tests.distributed.seeded import (
    DIFFERENCES,
    OF_REPLICAS,
    PATIENCE_S,
    TRAINING,
    WIDTH,
    Case,
    Failure,
    expected,
    squares,
    state_of,
    tensor_of,
    update,
)
from tests.distributed.virtual import HangError, KilledError, VirtualNetwork, World

_BLAMES = (
    r"ranks? ([\d, ]+(?:(?: or rank | and )\d+)*) (?:is gone|is silent|failed|for ')",
    r"got none from rank ([\d, ]+) within",
    r"got no connection to rank ([\d, ]+) \(",
    r"on rank (\d+) and .* on rank (\d+);",
)


_MEETING = "all processes must make the pipeline"


class BoomError(Exception):
    """What a layer or a loss raises."""


@dataclass
class Found:
    """What one rank has found.

    Attributes:
        results: of its calls, each with the state after it.
        error: the class and the text of what ended it.
        end_s: when it ended.
        again: of a step of another pipeline, which all ranks make after the first one; None if they make none.
        wrong: what is not as documented.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    again: dict[str, Any] | None = None
    error: tuple[type[BaseException], str] | None = None
    end_s: float = inf
    wrong: list[str] = field(default_factory=list)


class Trial:
    """One seed, run once.

    Attributes:
        case: what the seed draws.
        world: in which it ran.
        happened: the failures that did happen, and when.
        found: by each rank.
    """

    def __init__(self, seed: int) -> None:
        self.case = case = Case(seed)
        self.world = World(case.size, seed, case.unit_s, case.keeper)
        self.world.watch = self._uses_network
        self.happened: dict[Failure, float] = {}
        self.found = [Found() for _ in range(case.size)]
        self._passes = [0] * case.size
        # Ranks that make another pipeline, which nothing happens to.
        self._later: set[int] = set()
        self.world.run(self._job, case.late_s)

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    def _happens(self, failure: Failure) -> bool:
        """Note that a failure happens now; False if it has happened before."""
        if failure in self.happened or failure.rank in self._later:
            return False
        self.happened[failure] = self.world.now_s
        self.world.note(failure)
        return True

    def _uses_network(self, rank: int) -> None:
        world, case = self.world, self.case
        for failure in case.failures:
            if (failure.rank, failure.number) != (rank, world.operations[rank]) or failure.name:
                continue
            if failure.kind in ("kill", "interrupt"):
                self._strikes(failure)
            elif failure.kind in ("stall", "pause") and self._happens(failure):
                long_s = case.timeout_s * 3.0 + 30 if failure.kind == "stall" else case.timeout_s * 0.3
                world.pause(rank, long_s)
            elif failure.kind in ("cut", "hitch") and self._happens(failure):
                others = [each for each in range(case.size) if each not in failure.apart]
                world.cut(failure.apart, others, inf if failure.kind == "cut" else case.timeout_s * 0.3)

    def _passes_layer(self, rank: int) -> None:
        self._passes[rank] += 1
        for failure in self.case.failures:
            if (failure.rank, failure.number) == (rank, self._passes[rank]):
                if failure.kind == "exception" and self._happens(failure):
                    raise BoomError("by accident")
                if failure.name == "layer":
                    self._strikes(failure)

    def _strikes(self, failure: Failure) -> None:
        """A kill or an interrupt."""
        if self._happens(failure):
            if failure.kind == "interrupt":
                raise KeyboardInterrupt
            self.world.kill(failure.rank)
            self.world.living(failure.rank)

    def _differs(self, rank: int, name: str, number: int | None = None) -> bool:
        """Whether a rank has this otherwise than the others, as it makes the pipeline, or as it begins a call."""
        for each in self.case.failures:
            differs = each.kind == "difference" and each.name == name and number in (None, each.number)
            if differs and rank in self.case.by(each) and rank not in self._later:
                self._happens(each)
                return True
        return False

    # --- what a rank does --------------------------------------------------------------------------------------------

    def _job(self, network: VirtualNetwork) -> None:
        rank, world, found = network.own, self.world, self.found[network.own]
        replica, place = self.case.place(rank)
        # As a process group has them, they live longer than a pipeline.
        pipeline, replicas = (
            VirtualNetwork(world, ranks, rank)
            for ranks in (self.case.grid[replica], [row[place] for row in self.case.grid])
        )
        made: WeakSet[Any] = WeakSet()
        pipe = None
        try:
            pipe = self._pipeline(rank, made, pipeline, replicas)
            for number, call in enumerate(self.case.calls):
                for idle in self.case.failures:
                    if (idle.kind, idle.rank, idle.number) == ("idle", rank, number) and self._happens(idle):
                        if idle.silent:
                            world.pause(rank, 10 * self.case.timeout_s + 60)
                        return
                found.results.append(self._call(pipe, rank, number, call))
        except (KilledError, HangError):
            raise
        except BaseException as error:  # noqa: BLE001 - it is a result
            found.error = type(error), str(error)
        found.end_s = world.now_s
        world.note(f"rank {rank} is through with", found.error)
        gc.collect()
        if made:
            found.wrong.append(f"{len(made)} activations are kept")
        if pipe is not None:
            self._check_state(pipe, found)
        del pipe
        if self.case.again:
            self._later.add(rank)
            try:
                pipe = self._pipeline(rank, made, pipeline, replicas, 100 * self.case.timeout_s)
                found.again = self._call(pipe, rank, 0, "step")
            except (KilledError, HangError):
                raise
            except BaseException as error:  # noqa: BLE001 - it is a result
                found.wrong.append(f"another pipeline: {type(error).__name__}: {error}")
        if self.case.lingers[rank]:
            world.pause(rank, 10 * self.case.timeout_s + 60)

    def _pipeline(
        self, rank: int, made: WeakSet[Any], own: VirtualNetwork, replicas: VirtualNetwork, timeout_s: float = 0.0
    ) -> Pipe:
        case = self.case
        model = case.model(lambda what: self._passes_layer(rank))
        for layer in model.modules():
            if hasattr(layer, "probe"):
                layer.register_forward_hook(
                    lambda module, inputs, output: made.add(tensor_of(output).untyped_storage())
                )
        balance, schedule = [*case.balance], case.schedule
        if self._differs(rank, "balance"):
            other = [*balance[1:-1], balance[-1] + 1, balance[0] - 1] if max(balance) > 1 else [*balance, 1]
            balance = other if other != balance else [*balance, 1]
        if self._differs(rank, "schedule"):
            schedule = "gpipe" if schedule != "gpipe" else "1f1b"
        if self._differs(rank, "frozen"):
            first = next(model.parameters())
            first.requires_grad_(not first.requires_grad)
        return Pipe(
            model,
            balance,
            schedule=schedule,
            chunks=case.chunks,
            checkpoint=case.checkpoint,
            group=own,
            replicas=replicas if len(replicas.ranks) > 1 else None,
            timeout_s=timeout_s or case.timeout_s,
        )

    def _call(self, pipe: Pipe, rank: int, number: int, call: str) -> dict[str, Any]:
        case = self.case
        replica, place = case.place(rank)
        trains, several = call in TRAINING, len(case.grid) > 1
        x, target = case.batch(number, replica, int(trains and several and self._differs(rank, "rows", number)))
        given = case.given(x) if place == 0 else None
        result: dict[str, Any] = {}
        # To clip gradients none of these counts.
        runs = call != "clip"
        if runs and self._differs(rank, "chunks", number):
            pipe.chunks += 1
        if runs and self._differs(rank, "checkpoint", number):
            pipe.checkpoint = "never" if pipe.checkpoint != "never" else "always"
        if runs and self._differs(rank, "mode", number):
            pipe.eval()
        if self._differs(rank, "call", number):
            call, trains = ("evaluate", False) if call != "evaluate" else ("step", True)
        if trains and several and self._differs(rank, "freezes", number):
            first = next(pipe.parameters())
            first.requires_grad_(not first.requires_grad)
        if trains and several and self._differs(rank, "part", number):
            pipe[0].eval()
        if trains and several and self._differs(rank, "evaluation", number):
            with torch.no_grad():
                pipe(given)

        def loss(output: Tensor, wanted: Tensor) -> Tensor:
            self._passes_layer(rank)
            return squares(output, wanted)

        if call == "evaluate":
            with torch.no_grad():
                output = pipe(given)
            result["output"] = None if output is None else torch.cat(output) if case.ready else output.clone()
        elif call == "clip":
            result["norm"] = pipe.clip_grad_norm_(2e30 if self._differs(rank, "max_norm", number) else 1e30)
        else:
            if call == "load":
                state = case.model(version=number + 1).state_dict()
                pipe.load_state_dict({name: state[name] for name in pipe.state_dict()})
            there = several and any(each.grad is not None for each in pipe.parameters())
            if call != "add" and not (there and self._differs(rank, "gradients", number)):
                pipe.zero_grad()
            how = several and place == case.places[-1] and self._differs(rank, "reduction", number)
            with torch.set_grad_enabled(not self._differs(rank, "grad mode", number)):
                result["loss"] = pipe.step(given, case.given(target), loss, reduction="mean" if how else "sum")
            result["x"] = x.grad
            update([*pipe.parameters()])
        result["state"], result["generator"] = state_of(pipe), torch.get_rng_state()
        return result

    def _check_state(self, pipe: Pipe, found: Found) -> None:
        """What is documented of a pipeline that has failed, or has not."""
        if found.error is None:
            if pipe.failure is not None:
                found.wrong.append(f"no error, and yet failed: {pipe.failure}")
            return
        if pipe.failure is None:
            found.wrong.append(f"an error, and yet no failure: {found.error}")
        try:
            pipe.clip_grad_norm_(1.0)
        except PeerError as error:
            if "must run without failure, got" not in str(error):
                found.wrong.append(f"a call after a failure: {error}")
        else:
            found.wrong.append("a call after a failure raises nothing")


# --- what must hold --------------------------------------------------------------------------------------------------


def check(trial: Trial) -> list[str]:
    """What does not hold."""
    case, world = trial.case, trial.world
    wrong = [*world.wrong, *(f"rank {rank}: {each}" for rank, found in enumerate(trial.found) for each in found.wrong)]
    if world.hung:
        return [*wrong, "nothing happens any more, and ranks wait"]
    wanted = expected(case)
    for rank, found in enumerate(trial.found):
        replica, place = case.place(rank)
        # A rank that does something else may do it alone, where it has no neighbours.
        own = [each.number for each in trial.happened if each.kind == "difference" and rank in case.by(each)]
        for number, (result, there) in enumerate(
            zip(found.results[: min(own, default=None)], wanted[replica], strict=False)
        ):
            wrong += [f"rank {rank}, call {number}: {each}" for each in differences(result, there, place, case)]
    wrong += generators(trial)
    if case.again:
        begun = expected(case, ["step"])
        wrong += [
            f"rank {rank}, another pipeline: {each}"
            for rank, found in enumerate(trial.found)
            if found.again is not None
            for each in differences(found.again, begun[case.place(rank)[0]][0], case.place(rank)[1], case)
        ]
    harm = {failure: time_s for failure, time_s in trial.happened.items() if not failure.harmless}
    if not harm:
        wrong += [f"rank {rank} failed: {found.error}" for rank, found in enumerate(trial.found) if found.error]
        return wrong
    guilty = {rank for failure in harm for rank in case.by(failure)}
    gone = {failure.rank for failure in harm if failure.kind in ("kill", "idle")}
    if len(case.grid) == 1 and not any(failure.kind == "cut" for failure in harm):
        least = min(len(trial.found[rank].results) for rank in guilty)
        wrong += [
            f"rank {rank} ended {len(found.results)} calls, rank {min(guilty)} {least}"
            for rank, found in enumerate(trial.found)
            if len(found.results) > least + 1
        ]
    if any(each.kind == "difference" for each in harm) and not any(found.error for found in trial.found):
        wrong.append("nobody notices what differs")
    # As documented: a rank that never had all its connections is named, too, by those that wait for it.
    meeting = {rank for rank, found in enumerate(trial.found) if found.error and _MEETING in found.error[1]}
    limit_s = limit(trial, harm)
    for rank, found in enumerate(trial.found):
        if rank in gone:
            continue
        if found.end_s > limit_s:
            wrong.append(f"rank {rank} ended at {found.end_s:.3f} s, later than {limit_s:.3f} s")
        if found.error is not None:
            wrong += [
                f"rank {rank}: {each}"
                for each in misleading(rank, *found.error, harm, guilty, meeting, several=len(case.grid) > 2)
            ]
        elif len(found.results) < len(case.calls):
            wrong.append(f"rank {rank} ended without an error")
    return wrong


def limit(trial: Trial, harm: dict[Failure, float]) -> float:
    """When all ranks must have ended."""
    case, patience_s = trial.case, min(trial.case.timeout_s, PATIENCE_S)
    # Until all that does not wait is done.
    work_s = max(4000 * case.unit_s, case.late_s) + sum(
        0.3 * case.timeout_s for each in trial.happened if each.harmless
    )
    meeting = any(found.error and _MEETING in found.error[1] for found in trial.found)
    # A rank that goes on by itself, or stops before it has a pipeline, and stays or makes another: nothing tells of it.
    stays = any(
        (case.again or case.lingers[each.rank])
        and not (trial.found[each.rank].results and trial.found[each.rank].error)
        for each in harm
    )
    silent = meeting or stays or any(failure.silent for failure in harm)
    stands_s = 3 * case.timeout_s + 30 if any(failure.kind == "stall" for failure in harm) else 0.0
    return max(harm.values()) + work_s + 4 * patience_s + case.timeout_s * silent + stands_s


def misleading(
    rank: int,
    kind: type[BaseException],
    text: str,
    harm: dict[Failure, float],
    guilty: set[int],
    meeting: set[int],
    *,
    several: bool,
) -> Iterator[str]:
    """What is wrong with an error."""
    own = {"interrupt": KeyboardInterrupt, "exception": BoomError}
    if any(failure.rank == rank and own.get(failure.kind) is kind for failure in harm):
        return
    differs = any(failure.kind == "difference" for failure in harm)
    if kind is not PeerError and not (differs and issubclass(kind, (ValueError, IndexError))):
        yield f"{kind.__name__}: {text}"
        return
    names = [name for each in harm for name in (DIFFERENCES | OF_REPLICAS).get(each.name, ())]
    rule = "must be the same in all processes"
    named = any(f"{name} {rule}, got" in text for name in names)
    if {failure.kind for failure in harm} == {"difference"} and rule in text and not named:
        yield f"what differs is not named: {text}"
    if differs and rank in guilty:
        return
    blamed = {
        int(number) for form in _BLAMES for found in re.findall(form, text) for number in re.findall(r"\d+", str(found))
    }
    if {failure.kind for failure in harm} == {"exception"} and "BoomError: by accident" not in text:
        yield f"the cause is not told: {text}"
    if "which rank 0 keeps" in text or "no connection to rank others" in text:
        return
    # As documented: the silent rank, or one that waits for it, as any does while processes meet.
    if _MEETING in text or any(failure.silent for failure in harm):
        if not blamed:
            yield f"no rank is named: {text}"
    # Of three replicas and more each knows that one of the others is gone, but not which.
    elif not blamed & (guilty | meeting) or not (differs or several or blamed <= guilty | meeting):
        yield f"ranks {sorted(blamed)} are named for {sorted(guilty)}: {text}"


def generators(trial: Trial) -> Iterator[str]:
    """Which default generators of a pipeline are not alike, or have moved though nothing draws."""
    case = trial.case
    seed = torch.Generator().manual_seed(0).get_state()
    for row in case.grid:
        for number, results in enumerate(zip(*(trial.found[rank].results for rank in row), strict=False)):
            states = [result["generator"] for result in results]
            if not all(torch.equal(state, states[0]) for state in states):
                yield f"call {number}: the generators of ranks {row} differ"
            if not any(draws for *_, draws in case.layers) and not torch.equal(states[0], seed):
                yield f"call {number}: the generators of ranks {row} have moved"


def differences(result: dict[str, Any], wanted: dict[str, Any], place: int, case: Case) -> Iterator[str]:
    """What of a call on one rank is not what the plain module gives."""
    last = place == case.places[-1]
    for name, value in result.items():
        there = wanted.get(name)
        if name == "generator":
            continue
        if name == "state":
            for weight, (grad, values) in value.items():
                grad_there, values_there = there[weight]
                if not torch.equal(values, values_there):
                    yield f"the values of {weight} differ"
                if not same(grad, grad_there):
                    yield f"the gradient of {weight} differs: {grad} for {grad_there}"
        elif name == "output" and not last:
            if value is not None:
                yield "an output on another rank than the last"
        elif (name != "x" or place == case.places[0]) and not same(value, there):
            yield f"{name} differs: {value} for {there}"


def same(value: Any, there: Any) -> bool:
    """Whether two tensors are equal; a gradient of zeros is as good as none."""
    if value is None or there is None:
        return not any(each is not None and each.any() for each in (value, there))
    return bool(torch.equal(value, there.to(value.dtype)))


# --- the command -----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Of one seed."""

    seed: int
    wrong: list[str]
    kinds: list[str]
    digest: str
    cpu_s: float


def run(seed: int) -> Outcome:
    """Run one seed, and check it."""
    begin_s = time.process_time()
    try:
        trial = Trial(seed)
        wrong, kinds, log = check(trial), [each.kind for each in trial.happened], trial.world.log
    except Exception as error:  # noqa: BLE001 - of the check itself
        wrong, kinds, log = [f"{type(error).__name__}: {error}"], [], []
    digest = hashlib.sha256("\n".join(log).encode()).hexdigest()
    return Outcome(seed, wrong, kinds or ["none"], digest, time.process_time() - begin_s)


def prepare() -> None:
    """Once in each process."""
    torch.set_num_threads(1)
    torch.ones(1, WIDTH, requires_grad=True).sum().backward()
    # What is there already need not be looked at after each seed.
    gc.collect()
    gc.freeze()


def outcomes(seeds: Iterable[int], jobs: int = 1) -> Iterator[Outcome]:
    """Those of some seeds, in order."""
    if jobs == 1:
        prepare()
        yield from map(run, seeds)
    else:
        with ProcessPoolExecutor(jobs, initializer=prepare) as pool:
            yield from pool.map(run, seeds, chunksize=10)


def main(arguments: Sequence[str] | None = None) -> int:
    """The status: 1 if a seed fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.seeds", description=__doc__)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--seeds", metavar="FROM:TO", help="seeds, without the last one")
    chosen.add_argument("--seed", type=int, help="one seed, with what it draws and finds")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--log", action="store_true", help="print what happened, with --seed")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _one(options.seed, log=options.log)
    first, last = map(int, options.seeds.split(":"))
    failed, cpu_s, kinds, begin_s = 0, 0.0, Counter[str](), time.monotonic()
    for outcome in outcomes(range(first, last), options.jobs):
        cpu_s += outcome.cpu_s
        kinds.update(outcome.kinds)
        if outcome.wrong:
            failed += 1
            print(f"python -m tests.distributed.seeds --seed {outcome.seed}  # {outcome.wrong[0]}", flush=True)
    took = f"{time.monotonic() - begin_s:.0f} s, {cpu_s / max(last - first, 1):.2f} s of CPU each"
    print(f"{last - first} seeds, {failed} failed, {took}; what happened: {dict(sorted(kinds.items()))}")
    return int(failed > 0)


def _one(seed: int, *, log: bool) -> int:
    prepare()
    trial = Trial(seed)
    print(trial.case)
    if log:
        print(*trial.world.log, sep="\n")
    for rank, found in enumerate(trial.found):
        print(f"rank {rank}: {len(found.results)} calls until {found.end_s:.3f} s, {found.error or 'no error'}")
    wrong = check(trial)
    print(*wrong or ["as it should be"], sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
