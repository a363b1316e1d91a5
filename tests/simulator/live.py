"""The most bytes alive at once: what the engine holds on the CPU, and what the simulation says that it does."""

from __future__ import annotations

import copy

import torch

from gpipe_bench import Components, GPipe
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.measure.memory import LiveBytes
from gpipe_bench.schedules import named_schedule
from gpipe_bench.simulator.steps.run import Settings, run
from gpipe_bench.simulator.workloads.build import build_workload
from studies.simulator.effects import scratch
from tests.simulator.support import Plain
from tests.simulator.test_live_bytes import Loss


def work_of(module, x, balance, m, schedule=None, devices=None, *, shared=True):
    """The workload of such a step; the same for all schedules that split backward passes, or do not."""
    split = schedule is not None and named_schedule(schedule, m, len(balance), devices or len(balance)).splits
    sizes = {"balance": balance, "batch_size": len(x), "chunks": m, "scheduled": schedule is not None}
    # The mode that watches the engine keeps autograd from adding gradients up in place.
    sizes |= {"published": True, "optimizer": None, "shared": shared}
    return build_workload(module, **sizes, split=split, profile=load_profile("p40"), sample=x)


def live_peaks(module, x, balance, *, m, checkpoint, schedule=None, devices=None, components=None, work=None):
    """(real, simulated) in bytes, of a second step: the first one still learns what partitions do to their inputs.

    All tasks are issued in one thread, so that none runs beside another, and every partition is on one device; a
    schedule is one for ``devices``. The ``work`` is that of :func:`work_of`, if it is known.
    """
    n, chosen = len(balance), components or Components()
    options = {"checkpoint": checkpoint, "components": chosen, "transfer": "host", "schedule": schedule}
    pipe = GPipe(copy.deepcopy(module), balance, devices=["cpu"] * (devices or n), chunks=m, workers="never", **options)

    def step():
        if schedule:
            pipe.step(x, torch.zeros(len(x), 1), lambda output, _: Loss.apply(output))
        else:
            Loss.apply(pipe(x)).backward()

    step()
    pipe.zero_grad(set_to_none=True)
    with LiveBytes(pipe) as live, pipe.observe(live):
        step()
    work = work or work_of(module, x, balance, m, schedule, devices, shared=chosen.shared)
    places = {"devices": (0,) * n, "streams": False, "workers": False}
    found = run(scratch(0)(work), Plain(), Settings(**options, **places))
    return live.peak_total_bytes, found.peak_live_bytes[0]
