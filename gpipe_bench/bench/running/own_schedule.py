"""A schedule of one's own, simulated, emulated or run on this machine: when each of its actions ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from gpipe_bench.balance.by_time import balance_by_time
from gpipe_bench.bench.running.simulated import simulated_balance
from gpipe_bench.bench.spec.machine import find_machine
from gpipe_bench.bench.spec.settings import AUTO
from gpipe_bench.bench.spec.simulated_cells import SimulatedCell
from gpipe_bench.bench.spec.validation import validated
from gpipe_bench.engine.gpipe import GPipe
from gpipe_bench.errors import ConfigError
from gpipe_bench.measure.clock import synchronize, timed
from gpipe_bench.measure.timeline import Recorder
from gpipe_bench.models.table import MODELS, parse_arguments
from gpipe_bench.results.timeline import TimelineEvent
from gpipe_bench.schedules import Action, Schedule, with_recomputation
from gpipe_bench.schedules.cycles import checkpoint_stop
from gpipe_bench.simulator import Model, Step, simulate

_KINDS: Final = {"forward": "F", "recompute": "R", "backward": "B", "backward_inputs": "I", "backward_weights": "W"}
_STEPS: Final = 5


@dataclass(frozen=True, slots=True)
class OwnSchedule:
    """What is trained with which schedule.

    Attributes:
        schedule: without recomputations.
        model: name in the table of models, or of one's own.
        model_args: its arguments.
        batch_size: samples per step.
        checkpoint: ``always``, ``except_last`` or ``never``.
        profile: hardware of simulation and emulation.
        launch_us: host time of an operation there; None: the profile's.
        balance: layers per partition; empty: found.
    """

    schedule: Schedule
    model: str
    model_args: str
    batch_size: int
    checkpoint: str
    profile: str
    launch_us: float | None = None
    balance: Sequence[int] = ()

    @property
    def actions(self) -> Schedule:
        """The schedule with its recomputations."""
        return with_recomputation(self.schedule, checkpoint_stop(self.checkpoint, self.schedule.microbatches))

    def simulated(self) -> OwnRun:
        """One simulated step.

        Raises:
            ConfigError: it does not fit the memory, or settings are wrong.
        """
        return _of_simulation(simulate(self._model(), **self._settings()))

    def emulated(self) -> OwnRun:
        """One step of the engine on virtual devices, which this process has from then on.

        Raises:
            ConfigError: it does not fit the memory, or settings are wrong.
        """
        from gpipe_bench.emulator.emulate import emulate, prepare

        # The balance comes from traces, which are backward passes: virtual devices must be there before.
        prepare(self.profile)
        return _of_simulation(emulate(self._model(), **self._settings()))

    def measured(self) -> OwnRun:
        """The step of median length of some on this machine, on its GPUs or else on the CPU, in one process."""
        machine = find_machine()
        p = len(self.schedule.devices)
        places = [machine.device if machine.device == "cpu" else f"cuda:{k * machine.count // p}" for k in range(p)]
        spec, arguments = MODELS[self.model], parse_arguments(self.model, self.model_args)
        torch.manual_seed(0)
        module = spec.build(**arguments)
        inputs, target = spec.make_batch(self.batch_size, arguments, torch.Generator().manual_seed(0))
        m, n = self.schedule.microbatches, self.schedule.partitions
        balance = list(self.balance) or balance_by_time(n, module, inputs.chunk(m)[0], device=places[0])
        pipe = GPipe(
            module, balance, devices=places, chunks=m, checkpoint=self.checkpoint, schedule=self.schedule,
            transfer="direct" if machine.device == "cpu" or machine.count >= p else "host",
        )  # fmt: skip
        inputs, target = inputs.to(pipe.devices[0]), target.to(pipe.devices[-1])

        def step() -> None:
            pipe.zero_grad()
            pipe.step(inputs, target, spec.loss, reduction="mean")

        timed(step, pipe.devices, steps=1, warmup=1)
        runs = []
        for _ in range(_STEPS):
            synchronize(pipe.devices)
            recorder = Recorder()
            with pipe.observe(recorder):
                step()
            runs.append(OwnRun("measured", recorder.events()))
        return sorted(runs, key=lambda run: run.length_ms)[_STEPS // 2]

    def _model(self) -> Model:
        return Model(self.model, parse_arguments(self.model, self.model_args))

    def _settings(self) -> dict[str, Any]:
        m, n = self.schedule.microbatches, self.schedule.partitions
        shared = {name: getattr(self, name) for name in ("batch_size", "checkpoint", "profile", "launch_us")}
        given = {"model": self.model, "model_args": self.model_args, "partitions": n, "chunks": m, "balance": AUTO}
        cell = validated(SimulatedCell, {**given, **shared}, lambda path: str(path[0]))
        balance = list(self.balance) or simulated_balance(cell)
        return {**shared, "chunks": m, "schedule": self.schedule, "balance": balance}


@dataclass(frozen=True, slots=True)
class OwnRun:
    """One step.

    Attributes:
        evidence: ``simulated``, ``emulated`` or ``measured``.
        events: of its tasks.
        bound_by_host: whether the devices wait for the host, as far as is known.
        caveats: what makes its times less certain than others.
    """

    evidence: str
    events: Sequence[TimelineEvent]
    bound_by_host: bool = False
    caveats: Sequence[str] = ()

    @property
    def times(self) -> dict[Action, tuple[float, float]]:
        """Start and end of each action, in ms from the first start."""
        own = [event for event in self.events if event.kind in _KINDS]
        zero = min((event.start_us for event in own), default=0.0)
        return {
            Action(_KINDS[event.kind], event.microbatch, event.partition): (
                (event.start_us - zero) / 1000,
                (event.end_us - zero) / 1000,
            )
            for event in own
        }

    @property
    def length_ms(self) -> float:
        """From the start of the first action to the end of the last."""
        return max((end for _, end in self.times.values()), default=0.0)


def _of_simulation(step: Step) -> OwnRun:
    if step.status != "ok":
        raise ConfigError([f"the step must fit the memory, got {step.reason}"])
    return OwnRun(step.evidence, step.events, step.bound_by_host, step.caveats)
