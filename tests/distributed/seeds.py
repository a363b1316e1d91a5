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
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from math import inf
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from gpipe_bench import Components
from gpipe_bench.distributed import PeerError, Pipe
from tests.distributed import seeded_checkpoints
from tests.distributed.seeded import TRAINING, Case, Failure, Topology
from tests.distributed.seeded_layers import WIDTH, Norm, Signs, squares, tensor_of
from tests.distributed.seeded_reference import state_of
from tests.distributed.seeds_checks import BoomError, check
from tests.distributed.virtual import HangError, KilledError, VirtualNetwork, World


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
        saved: the checkpoint of each rank.
    """

    def __init__(self, seed: int) -> None:
        self.case = case = Case(seed)
        self.world = World(case.size, seed, case.unit_s, case.keeper)
        self.world.watch = self._uses_network
        self.happened: dict[Failure, float] = {}
        self.found = [Found() for _ in range(case.size)]
        self.saved: dict[int, dict[str, Any]] = {}
        self._folder: TemporaryDirectory[str] | None = None
        self._networks: dict[tuple[int, ...], VirtualNetwork] = {}
        self._passes = [0] * case.size
        # Ranks that make another pipeline, which nothing happens to.
        self._later: set[int] = set()
        try:
            self.world.run(self._job, case.late_s)
        finally:
            if self._folder is not None:
                self._folder.cleanup()

    @property
    def has_checkpoint(self) -> bool:
        """Whether all ranks have saved their part."""
        return len(self.saved) == self.case.size

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
        rank, found = network.own, self.found[network.own]
        made: WeakSet[Any] = WeakSet()
        if not self._first(rank, made):
            return
        if self.case.again:
            self._later.add(rank)
            try:
                found.again = self._again(rank, made)
            except (KilledError, HangError):
                raise
            except BaseException as error:  # noqa: BLE001 - it is a result
                found.wrong.append(f"another pipeline: {type(error).__name__}: {error}")
        if self.case.lingers[rank]:
            self.world.pause(rank, 10 * self.case.timeout_s + 60)

    def _first(self, rank: int, made: WeakSet[Any]) -> bool:
        """All calls of the first pipeline; False if the rank makes no more of them."""
        world, case, found, pipe = self.world, self.case, self.found[rank], None
        try:
            pipe = self._pipeline(rank, made, case.first)
            optimizer = Signs(pipe.parameters())
            for number, call in enumerate(case.calls):
                for idle in case.failures:
                    if (idle.kind, idle.rank, idle.number) == ("idle", rank, number) and self._happens(idle):
                        if idle.silent:
                            world.pause(rank, 10 * case.timeout_s + 60)
                        return False
                found.results.append(self._call(pipe, optimizer, rank, number, call))
                if number == case.saved_after:
                    self.saved[rank] = seeded_checkpoints.copied(seeded_checkpoints.checkpoint_of(pipe, optimizer))
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
        return True

    def _groups(self, rank: int, topology: Topology) -> dict[str, VirtualNetwork]:
        """Those of a rank: its pipeline, and its replicas. As process groups, they count the pipelines made of them."""
        replica, place = topology.place(rank)
        found = {"group": topology.grid[replica], "replicas": [row[place] for row in topology.grid]}
        for ranks in found.values():
            self._networks.setdefault((rank, *ranks), VirtualNetwork(self.world, ranks, rank))
        return {name: self._networks[rank, *ranks] for name, ranks in found.items()}

    def _again(self, rank: int, made: WeakSet[Any]) -> dict[str, Any]:
        """A step of another pipeline, in another topology, from the checkpoint if there is one."""
        case, second = self.case, self.case.second
        empty = case.saved_after is not None and case.into_empty
        pipe = self._pipeline(rank, made, second, 100 * case.timeout_s, empty=empty)
        optimizer = Signs(pipe.parameters())
        if self.has_checkpoint:
            if self._folder is None:
                self._folder = TemporaryDirectory()
                # Each replica has statistics of its own.
                ranks = case.grid[0] if case.norms else range(case.size)
                seeded_checkpoints.save([self.saved[each] for each in ranks], self._folder.name)
            seeded_checkpoints.load(pipe, optimizer, self._folder.name)
        elif empty:
            state = case.model().state_dict()
            pipe.load_state_dict({name: state[name] for name in pipe.state_dict()})
        return self._call(pipe, optimizer, rank, 0, "step", second)

    def _pipeline(
        self,
        rank: int,
        made: WeakSet[Any],
        topology: Topology,
        timeout_s: float = 0.0,
        *,
        empty: bool = False,
    ) -> Pipe:
        """The pipeline of a rank, without values of its weights if it is to be ``empty``."""
        case, groups = self.case, self._groups(rank, topology)
        strange = case.strange and topology.place(rank)[0] > 0
        device = "meta" if empty or rank in case.on_meta else "cpu"
        model = case.model(lambda what: self._passes_layer(rank), 60 if strange else 0, device)
        for layer in model.modules():
            if hasattr(layer, "probe"):
                layer.register_forward_hook(
                    lambda module, inputs, output: made.add(tensor_of(output).untyped_storage())
                )
            if isinstance(layer, Norm) and strange and device == "cpu":
                layer.norm.running_mean.fill_(3.0)
        balance, schedule = [*topology.balance], topology.schedule
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
            chunks=topology.chunks,
            checkpoint=topology.checkpoint,
            group=groups["group"],
            replicas=groups["replicas"] if len(topology.grid) > 1 else None,
            deferred_batch_norm=case.deferred != self._differs(rank, "deferred"),
            components=Components(shared=case.shared != self._differs(rank, "shared")),
            materialise=None if empty else reset,
            timeout_s=timeout_s or case.timeout_s,
        )

    def _call(
        self, pipe: Pipe, optimizer: Signs, rank: int, number: int, call: str, topology: Topology | None = None
    ) -> dict[str, Any]:
        case, topology = self.case, topology or self.case.first
        replica, place = topology.place(rank)
        several = len(topology.grid) > 1
        more = call in TRAINING and several and self._differs(rank, "rows", number)
        x, target = case.batch(number, replica, int(more))
        given = case.given(x) if place == 0 else None
        call = self._begins(pipe, rank, number, call, given, several=several)
        result: dict[str, Any] = {}
        if call in ("evaluate", "infer"):
            with torch.no_grad() if call == "evaluate" else torch.inference_mode():
                result["output"] = joined(pipe(given))
        elif call == "clip":
            result["norm"] = pipe.clip_grad_norm_(2e30 if self._differs(rank, "max_norm", number) else 1e30)
        else:
            if call == "load":
                state = case.model(version=number + 1).state_dict()
                pipe.load_state_dict({name: state[name] for name in pipe.state_dict()})
            there = several and any(each.grad is not None for each in pipe.parameters())
            if call not in ("add", "hold") and not (there and self._differs(rank, "gradients", number)):
                optimizer.zero_grad()
            how = several and place == topology.places[-1] and self._differs(rank, "reduction", number)
            result |= self._step(pipe, rank, number, given, case.given(target), "mean" if how else "sum")
            result["x"] = x.grad
            if call != "hold":
                optimizer.step()
        result["state"], result["generator"] = state_of(pipe, optimizer), torch.get_rng_state()
        return result

    def _begins(self, pipe: Pipe, rank: int, number: int, call: str, given: Any, *, several: bool) -> str:
        """Set the mode of a call, and what a rank has otherwise than the others; gives its call, which may differ."""
        # To clip gradients none of these counts.
        if call != "clip":
            if self._differs(rank, "chunks", number):
                pipe.chunks += 1
            if self._differs(rank, "checkpoint", number):
                pipe.checkpoint = "never" if pipe.checkpoint != "never" else "always"
            pipe.train((call != "infer") != self._differs(rank, "mode", number))
        if self._differs(rank, "call", number):
            return "step" if call in ("evaluate", "infer") else "evaluate"
        if call in TRAINING and several:
            if self._differs(rank, "freezes", number):
                first = next(pipe.parameters())
                first.requires_grad_(not first.requires_grad)
            if self._differs(rank, "part", number):
                pipe[0].eval()
            if self._differs(rank, "evaluation", number):
                with torch.no_grad():
                    pipe(given)
        return call

    def _step(self, pipe: Pipe, rank: int, number: int, given: Any, target: Any, reduction: str) -> dict[str, Any]:
        def loss(output: Tensor, wanted: Tensor) -> Tensor:
            self._passes_layer(rank)
            return squares(output, wanted)

        options: Any = {"reduction": reduction, "return_output": self.case.returns_output}
        with torch.set_grad_enabled(not self._differs(rank, "grad mode", number)):
            found = pipe.step(given, target, loss, **options)
        return {"loss": found[0], "output": joined(found[1])} if self.case.returns_output else {"loss": found}

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


def reset(module: nn.Module) -> None:
    """Set the weights of a module of PyTorch's, or of :class:`Layer`, that had none."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def joined(output: Any) -> Any:
    """An output of its own; those of ready-made micro-batches are a list."""
    return None if output is None else torch.cat(output) if isinstance(output, list) else output.clone()


# --- the command -----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Of one seed: what is wrong, what happened and how it ended, a digest of the log, and the time that it took."""

    seed: int
    wrong: list[str]
    kinds: list[str]
    ends: list[str]
    digest: str
    cpu_s: float


def run(seed: int) -> Outcome:
    """Run one seed, and check it."""
    begin_s = time.process_time()
    try:
        trial = Trial(seed)
        wrong, kinds, log = check(trial), [each.kind for each in trial.happened], trial.world.log
        ends = ends_of(trial)
    except Exception as error:  # noqa: BLE001 - of the check itself
        wrong, kinds, log, ends = [f"{type(error).__name__}: {error}"], [], [], ["the check"]
    digest = hashlib.sha256("\n".join(log).encode()).hexdigest()
    return Outcome(seed, wrong, kinds or ["none"], ends, digest, time.process_time() - begin_s)


def ends_of(trial: Trial) -> list[str]:
    """How a seed has ended: in numbers of all ranks, refused before anything ran, or with a failure that is named."""
    errors = [found.error[0] for found in trial.found if found.error]
    whole = all(len(found.results) == len(trial.case.calls) for found in trial.found)
    found = ["refused" if ValueError in errors else "failed" if errors or not whole else "all calls"]
    found += ["another topology"] if trial.case.again else []
    return [*found, "from a checkpoint"] if trial.has_checkpoint else found


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
    failed, cpu_s, kinds, ends, begin_s = 0, 0.0, Counter[str](), Counter[str](), time.monotonic()
    for outcome in outcomes(range(first, last), options.jobs):
        cpu_s += outcome.cpu_s
        kinds.update(outcome.kinds)
        ends.update(outcome.ends)
        if outcome.wrong:
            failed += 1
            print(f"python -m tests.distributed.seeds --seed {outcome.seed}  # {outcome.wrong[0]}", flush=True)
    took = f"{time.monotonic() - begin_s:.0f} s, {cpu_s / max(last - first, 1):.2f} s of CPU each"
    print(f"{last - first} seeds, {failed} failed, {took}")
    print(f"what happened: {dict(sorted(kinds.items()))}; how they ended: {dict(sorted(ends.items()))}")
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
