"""The engine, torchgpipe and fairscale on virtual devices: the published ablation and the published table of speed.

    package ── its own threads, autograd, streams ──> trace ──> replay on P40s ──> times of steps, reserved memory

The packages run as they are installed, but for their module ``stream``, see
:mod:`studies.peers.virtual_streams`. torchgpipe goes without a component as follows. Without Fork and Join:
``depend`` does nothing. Without copy streams: copies go on the compute streams. Without portals: skips are no skips of
its own, but ride in the tuple of their micro-batch. It has no early recomputation across devices on PyTorch 2.9 and
later, where autograd lets a copy's receiver wait for its sender.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.results.configurations import canonical, configurations_beside, digest
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import csv_text
from gpipe_bench.simulator.published.settings import published_settings
from gpipe_bench.suite.running.failures import status_of
from gpipe_bench.suite.running.simulated import simulation_facts
from gpipe_bench.util.files import write_files

_GIB: Final = 2**30
_PROFILE: Final = "p40"
_STEPS: Final = 6
_ENGINE: Final = "gpipe_bench"
_VARIANTS: Final = {
    _ENGINE: PUBLISHED,
    "torchgpipe": PUBLISHED,
    "fairscale": ("dep-str-ptl",),
}
_SPEED: Final = ("pipeline-1", "pipeline-2", "pipeline-4", "pipeline-8")


@dataclass(frozen=True, slots=True)
class EmulatedCase:
    """One package in one pipeline.

    Attributes:
        experiment: ``ablation``, or the row of the published table of speed.
        contender: ``gpipe_bench``, ``torchgpipe`` or ``fairscale``.
        variant: label of the components that are on.
        model_args: of the U-Net.
        balance: layers per partition.
        chunks: micro-batches asked for.
        batch_size: samples of a batch.
    """

    experiment: str
    contender: str
    variant: str
    model_args: str
    balance: tuple[int, ...]
    chunks: int
    batch_size: int

    @property
    def configuration(self) -> str:
        """All that decides the rows; see :mod:`gpipe_bench.results.configurations`."""
        return canonical({**asdict(self), "profile": _PROFILE, "steps": _STEPS, "checkpoint": "except_last"})

    @property
    def cell(self) -> str:
        """A name for its rows."""
        name = f"emulated-{self.contender.replace('_', '-')}-{self.variant}-{self.experiment}"
        return f"{name}-{digest(self.configuration)[:8]}"


def emulated_cases() -> list[EmulatedCase]:
    """All cases: those of the published ablation, then of the published table of speed."""
    ablation = ("depth=5;B=5;C=64;size=192", (34, 76, 70, 61), 8, 128)
    cases = [
        EmulatedCase("ablation", contender, label, *ablation)
        for contender, labels in _VARIANTS.items()
        for label in labels
    ]
    rows = {row.experiment: row for row in published_settings() if row.table == "unet-speed"}
    cases += [
        EmulatedCase(name, contender, "dep-str-ptl", row.model_args, row.layers, row.chunks, row.batch_size)
        for name, row in rows.items()
        if name in _SPEED
        for contender in _VARIANTS
    ]
    return cases


def run_cases(cases: Sequence[EmulatedCase], report: Callable[[str], None]) -> list[Row]:
    """A row for each step but the first of each case, each run in a process of its own.

    Args:
        cases: what to run.
        report: takes a line about each case.
    """
    rows, facts = [], simulation_facts()
    for case in cases:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found = pool.submit(_values, case).result()
        own = [_row(case, {**facts, **values, "repeat": repeat}) for repeat, values in enumerate(found)]
        rates = [f"{row.throughput_samples_per_s:.1f} samples/s" if row.status == "ok" else row.reason for row in own]
        report(f"{case.experiment} {case.contender} {case.variant}: {rates[0]}")
        rows += own
    return rows


def write_rows(out: Path, cases: Sequence[EmulatedCase], rows: Sequence[Row]) -> None:
    """Write the table and its configurations: both or none."""
    text = csv_text(Row.columns(), [row.to_dict() for row in rows])
    write_files({out: text, **configurations_beside(out, [case.configuration for case in cases])})


def _row(case: EmulatedCase, values: dict[str, Any]) -> Row:
    components = Components.from_label(case.variant)
    return Row(
        experiment=case.experiment, evidence="emulated", model="unet", model_args=case.model_args,
        variant=case.variant, **{name: getattr(components, name) for name in Components.switched()},
        partitions=len(case.balance), chunks=case.chunks, microbatches=case.chunks, checkpoint="except_last",
        batch_size=case.batch_size, balance="-".join(map(str, case.balance)), device_count=len(case.balance),
        profile=_PROFILE, cell=case.cell, config_sha256=digest(case.configuration), steps_overlap=True,
        precision="float32", optimizer="sgd", **values,
    )  # fmt: skip


def _values(case: EmulatedCase) -> list[dict[str, Any]]:
    """The values of the rows; whatever a package raises becomes one."""
    try:
        return _emulated(case)
    except ModuleNotFoundError as error:
        return [{"status": "skipped", "reason": f"{error.name} is not installed; run: make peers"}]
    except Exception as error:  # noqa: BLE001 - as it says
        status, reason = status_of(error)
        return [{"status": status, "reason": reason}]


def _emulated(case: EmulatedCase) -> list[dict[str, Any]]:
    # Here and not above: a process has virtual devices from here on.
    from gpipe_bench.emulator.handovers import seen
    from gpipe_bench.emulator.recording import mark, recording
    from gpipe_bench.emulator.shapes import load_shapes
    from gpipe_bench.machine.profile import HardwareMachine, load_profile
    from gpipe_bench.machine.replay import replay

    profile = load_profile(_PROFILE)
    load_shapes(len(case.balance), profile)
    facts: dict[str, Any] = {
        "device": f"cuda {profile.device}",
        "source": f"{case.contender} {version(case.contender)}",
        "torch": version("torch").partition("+")[0],
    }
    with recording() as trace, seen():
        step = _step(case)
        for _ in range(_STEPS):
            step()
            mark()
    replayed = replay(trace, HardwareMachine(profile))
    if replayed.shortage:
        return [{"status": "oom", "reason": f"device {replayed.shortage.device} is full", **facts}]
    facts["peak_allocated_gib"] = sum(use.peak_allocated for use in replayed.memory) / _GIB
    facts["peak_reserved_gib"] = sum(use.peak_reserved for use in replayed.memory) / _GIB
    times = [(end - begin) / 1e6 for begin, end in pairwise(replayed.marks)]
    return [{**facts, "step_time_ms": time, "throughput_samples_per_s": case.batch_size / time * 1e3} for time in times]


def _step(case: EmulatedCase) -> Callable[[], None]:
    """A step of a package: forward and backward pass of a batch, and SGD, as torchgpipe's benchmarks have it."""
    import torch

    from gpipe_bench.models.table import MODELS, parse_arguments

    spec = MODELS["unet"]
    arguments = parse_arguments("unet", case.model_args)
    with torch.device("meta"):
        model = spec.build(**arguments)
    places = [torch.device("virtual", number) for number in range(len(case.balance))]
    pipe: Any = _pipe(case, model, places)
    inputs, target = spec.make_batch(case.batch_size, arguments, device="meta")
    inputs, target = torch.empty_like(inputs, device=places[0]), torch.empty_like(target, device=places[-1])

    def step() -> None:
        for parameter in pipe.parameters():
            parameter.grad = None
        torch.autograd.backward(spec.loss(pipe(inputs), target))
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.add_(parameter.grad, alpha=-0.1)

    return step


def _pipe(case: EmulatedCase, model: Any, places: Sequence[Any]) -> Any:
    from gpipe_bench import GPipe
    from gpipe_bench.judge.skips import carried

    components = Components.from_label(case.variant)
    options: dict[str, Any] = {"devices": places, "chunks": case.chunks, "checkpoint": "except_last"}
    if case.contender == _ENGINE:
        return GPipe(model.to_empty(device=places[0]), list(case.balance), components=components, **options)
    from gpipe_bench.judge.adapters.torchgpipe import PIPES, pipe_of
    from studies.peers.virtual_streams import on_virtual_devices

    home, _ = PIPES[case.contender]
    on_virtual_devices(home)
    pipeline: Any = importlib.import_module(f"{home}.pipeline")
    layers = (model if components.portals else carried(model)).to_empty(device=places[0])
    pipe: Any = pipe_of(case.contender, layers, list(case.balance), **options)
    if not components.fork_join:
        pipeline.depend = lambda _before, _after: None
    if not components.copy_streams:
        streams = [[pipeline.current_stream(place)] * case.chunks for place in places]
        pipe._ensure_copy_streams = lambda: streams  # noqa: SLF001 - as torchgpipe's own benchmark replaces it
    return pipe
