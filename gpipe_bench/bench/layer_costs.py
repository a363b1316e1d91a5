"""What each layer costs on a hardware profile, and the balance that follows; nothing is measured."""

from __future__ import annotations

from functools import lru_cache

from gpipe_bench.balance.partition import split_min_max
from gpipe_bench.simulator.build import workload_of
from gpipe_bench.simulator.hardware import HardwareMachine, load_profile
from gpipe_bench.simulator.sources import model_of_suite
from models.table import parse_arguments

__all__ = ["layer_costs", "simulated_balance"]


def simulated_balance(
    model: str, model_args: str, *, partitions: int, microbatch_size: int, checkpoint: str, profile: str
) -> list[int]:
    """Layers per partition such that the slowest partition is as fast as it can be on a profile.

    Args:
        model: name in the table of models.
        model_args: its arguments, ``key=value`` joined by ``;``.
        partitions: n.
        microbatch_size: samples of a micro-batch.
        checkpoint: ``always``, ``except_last`` or ``never``; without it nothing is recomputed.
        profile: name or file of a hardware profile.

    Raises:
        BalanceError: more partitions than layers.
        ConfigError: no such model or profile.
    """
    costs = layer_costs(model, model_args, microbatch_size, checkpoint != "never", profile)
    return split_min_max(costs, partitions)


@lru_cache(maxsize=256)
def layer_costs(model: str, model_args: str, microbatch_size: int, recompute: bool, profile: str) -> tuple[float, ...]:
    """Nanoseconds that each layer keeps its device busy for a micro-batch, forward and backward.

    Where the host takes longer to launch the kernels than the device to run them, the host's time counts.
    """
    hardware = load_profile(profile)
    source = model_of_suite(model, dict(parse_arguments(model, model_args)))
    launch_ns = HardwareMachine(hardware).launch_ns
    work = workload_of(
        source,
        balance=[1] * len(source.facts()),
        batch_size=microbatch_size,
        chunks=1,
        profile=hardware,
        optimizer=None,
    )
    tasks = [work.task(0, j) for j in range(work.n)]
    passes = [(t.forward, t.backward, t.recompute) if recompute else (t.forward, t.backward) for t in tasks]
    return tuple(float(sum(max(p.duration_ns, p.launches * launch_ns) for p in own)) for own in passes)
