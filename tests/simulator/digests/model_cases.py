"""Runs of models with their requests for memory: small ones of the suite, and layers that do unusual things."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any, Final

import torch
from torch import nn

from gpipe_bench.models.table import check_arguments, model_spec
from gpipe_bench.simulator.clock.run import Settings
from gpipe_bench.simulator.hardware.profile import HardwareMachine, load_profile
from gpipe_bench.simulator.workloads.build import Model, build_workload
from gpipe_bench.simulator.workloads.workload import Workload
from tests.simulator.digests.cases import Case, Cases
from tests.simulator.digests.draw import Draw
from tests.simulator.digests.pieces import FLAVOURS, MODES, Wires, grid, some_components
from tests.simulator.test_live_copies import SHARING, WRITING
from tests.simulator.test_live_frozen import MODELS as FROZEN

__all__ = ["MODELLED"]

# (model, samples, chunks, profile, GiB of a device: enough, and less and less)
_SUITE: Final = {
    "unet": (Model("unet", {"depth": 3, "B": 2, "C": 16, "size": 64}), 60, 8, "p40", (22.0, 0.20, 0.14, 0.10)),
    "amoebanet-d": (Model("amoebanet-d", {"L": 12, "D": 32, "size": 96}), 30, 6, "p40", (22.0, 0.12, 0.06, 0.05)),
    "vit": (Model("vit", {"L": 6, "D": 256, "heads": 4, "size": 112}), 48, 6, "h100", (75.0, 0.14, 0.11, 0.09)),
    "gpt2": (Model("gpt2", {"L": 4, "D": 128, "heads": 4, "context": 64}), 21, 4, "v100", (31.0, 0.80, 0.797, 0.79)),
}
_N: Final = 4
# So that what is drawn does not go with the components, which are drawn by the number of the case.
_OTHER: Final = 10**6


def suite() -> Iterator[Case]:
    """Models of the suite with other components each time, on devices of their own and shared ones, and small ones."""
    turn = count()
    for name, (model, samples, chunks, profile, sizes) in _SUITE.items():
        layers = model_spec(model.name).layers(check_arguments(model.name, model.arguments))
        balance = [layers // _N + (j < layers % _N) for j in range(_N)]
        # Constants of kinds of kernels change with every measurement.
        hardware = load_profile(profile).model_copy(update={"kernels": None})
        work = build_workload(
            model, balance=balance, batch_size=samples, chunks=chunks, profile=hardware, optimizer="adam"
        )
        for gib in sizes:
            small = hardware.model_copy(update={"memory_gib": gib + hardware.context_gib})
            machine = HardwareMachine(small)
            ways: dict[str, Any] = {"flavour": FLAVOURS, "checkpoint": MODES, "devices": ((), (0, 0, 1, 1))}
            ways["schedule"] = (None, "gpipe")
            for words, values in grid(**ways):
                number = next(turn)
                components = some_components(number)
                transfer = Draw(_OTHER + number).pick(("direct", "direct", "host"))
                chosen = Settings(**values, components=components, transfer=transfer, steps=2)
                yield Case(f"{name} {gib} {words} {transfer} {components.label}", work, machine, chosen)


def layers() -> Iterator[Case]:
    """Layers that write in place, share gradients, train nothing or give numbers without gradients."""
    turn = count()
    for name, (modules, balance) in {**WRITING, **SHARING, **FROZEN}.items():
        work = _work(nn.Sequential(*modules), balance)
        for words, values in grid(flavour=FLAVOURS, checkpoint=MODES, schedule=(None, "gpipe")):
            number = next(turn)
            draw = Draw(_OTHER + number)
            chosen = Settings(**values, components=some_components(number), steps=2)
            if draw.chance(0.3):
                chosen = replace(chosen, devices=(0,) * work.n, transfer="host", streams=draw.chance(0.5))
            place = f"{chosen.transfer} {'streams' if chosen.streams else 'no-streams'}"
            yield Case(f"{name}: {words} {place} {chosen.components.label}", work, Wires(launch_ns=3000), chosen)


def _work(module: nn.Module, balance: list[int]) -> Workload:
    return build_workload(
        module, balance=balance, batch_size=1024, chunks=4, profile=load_profile("p40"), sample=torch.ones(256, 64)
    )


MODELLED: Final[dict[str, Cases]] = {"models": suite, "layers": layers}
"""The groups."""
