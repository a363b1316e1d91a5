"""What must hold of a seed that has run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from gpipe_bench.distributed import PeerError
from tests.distributed.seeded import DIFFERENCES, OF_REPLICAS, PATIENCE_S, TRAINING, Case, Failure, Topology
from tests.distributed.seeded_reference import expected, expected_again

if TYPE_CHECKING:
    from tests.distributed.seeds import Trial

_BLAMES = (
    r"ranks? ([\d, ]+(?:(?: or rank | and )\d+)*) (?:is gone|is silent|failed|for ')",
    r"got none from rank ([\d, ]+) within",
    r"got no connection to rank ([\d, ]+) \(",
    r"on rank (\d+) and .* on rank (\d+);",
)
_MEETING = "all processes must make the pipeline"


class BoomError(Exception):
    """What a layer or a loss raises."""


def check(trial: Trial) -> list[str]:
    """What does not hold."""
    case, world = trial.case, trial.world
    wrong = [*world.wrong, *(f"rank {rank}: {each}" for rank, found in enumerate(trial.found) for each in found.wrong)]
    if world.hung:
        return [*wrong, "nothing happens any more, and ranks wait"]
    wrong += values(trial)
    wrong += generators(trial)
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
    compared = [each for each in harm if each.kind == "difference" and not evaluates_alone(case, each)]
    if compared and not any(found.error for found in trial.found):
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


def evaluates_alone(case: Case, failure: Failure) -> bool:
    """Whether a rank only evaluates otherwise, in a pipeline of one process: replicas compare what they do in steps."""
    if len(case.grid[0]) > 1 or failure.name not in ("chunks", "checkpoint", "mode"):
        return False
    # The mode is set anew for each call.
    calls = case.calls[failure.number : failure.number + 1 if failure.name == "mode" else None]
    return not any(call in TRAINING for call in calls)


def values(trial: Trial) -> Iterator[str]:
    """Which numbers are not those of the plain module."""
    case, wanted = trial.case, expected(trial.case)
    for rank, found in enumerate(trial.found):
        replica, place = case.place(rank)
        # A rank that does something else may do it alone, where it has no neighbours.
        own = [each.number for each in trial.happened if each.kind == "difference" and rank in case.by(each)]
        for number, (result, there) in enumerate(zip(found.results[: min(own, default=None)], wanted, strict=False)):
            for each in differences(result, there[replica], place, case.first):
                yield f"rank {rank}, call {number}: {each}"
    if case.again:
        begun = expected_again(case, loaded=trial.has_checkpoint)
        for rank, found in enumerate(trial.found):
            replica, place = case.second.place(rank)
            for each in differences(found.again or {}, begun[replica], place, case.second):
                yield f"rank {rank}, another pipeline: {each}"


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


def differences(result: dict[str, Any], wanted: dict[str, Any], place: int, topology: Topology) -> Iterator[str]:
    """What of a call on one rank is not what the plain module gives."""
    last = place == topology.places[-1]
    for name, value in result.items():
        there = wanted.get(name)
        if name == "generator":
            continue
        if name == "state":
            for weight, (grad, values, momentum) in value.items():
                grad_there, values_there, momentum_there = there[weight]
                if not equal(weight, values, values_there):
                    yield f"the values of {weight} differ: {values} for {values_there}"
                if not same(grad, grad_there):
                    yield f"the gradient of {weight} differs: {grad} for {grad_there}"
                if not same(momentum, momentum_there):
                    yield f"the momentum of {weight} differs: {momentum} for {momentum_there}"
        elif name == "output" and not last:
            if value is not None:
                yield "an output on another rank than the last"
        elif (name != "x" or place == topology.places[0]) and not same(value, there):
            yield f"{name} differs: {value} for {there}"


def equal(name: str, values: Any, there: Any) -> bool:
    """Whether values are equal; statistics of micro-batches, put together, are so but for rounding."""
    if "running" not in name:
        return bool(torch.equal(values, there))
    return bool(torch.allclose(values, there, rtol=1e-12, atol=1e-12))


def same(value: Any, there: Any) -> bool:
    """Whether two tensors are equal; a gradient of zeros is as good as none."""
    if value is None or there is None:
        return not any(each is not None and each.any() for each in (value, there))
    return bool(torch.equal(value, there.to(value.dtype)))
