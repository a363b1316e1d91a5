"""The ranks of a cell with several processes: how they are started, and how what they measure becomes one result.

gpipe-bench run --processes 4    starts torchrun, on several hosts of a Slurm job by srun
torchrun                         starts the same command in each rank, with RANK and WORLD_SIZE in its environment
ranks                            measure together; rank 0 writes the result
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from gpipe_bench.errors import ConfigError, PeerError
from gpipe_bench.suite.cell_files import cells_text
from gpipe_bench.suite.cells import MeasuredCell
from gpipe_bench.suite.storage.raw import RawResult
from gpipe_bench.util.processes import end_with

T = TypeVar("T")

_PATIENCE: Final = timedelta(minutes=10)
_PORT: Final = 29400
_OF_JOB: Final = ("SLURM_JOB_ID", "SLURM_CONF")
_LOOPBACK: Final = Path("/sys/class/net/lo")


def rank_here(cell: MeasuredCell) -> int | None:
    """The rank of this process, if torchrun or another launcher has started it; else None.

    Raises:
        ConfigError: it has started other processes than the cell has.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    size = int(os.environ["WORLD_SIZE"])
    hosts = size // int(os.environ.get("LOCAL_WORLD_SIZE", size // cell.hosts or 1))
    if (size, hosts) != (cell.processes, cell.hosts):
        rule = f"--processes and --hosts must be the {size} and {hosts} that were started"
        raise ConfigError([f"{rule}, got {cell.processes} and {cell.hosts}; change them, or start others"])
    return int(os.environ["RANK"])


def run_in_ranks(cell: MeasuredCell, repeat: int) -> RawResult:
    """Start the ranks of ``cell`` and wait for the result that rank 0 writes.

    Raises:
        ConfigError: the cell is for several hosts, and this process is not in a job of Slurm.
        PeerError: rank 0 ended without a result.
    """
    launcher = launch_command(cell, os.environ)
    # Rank 0 may be on another host: those of a job share the folder where it was started.
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=Path.cwd() if cell.hosts > 1 else None) as folder:
        cells, out = Path(folder) / "cells.json", Path(folder) / "result.json"
        cells.write_text(cells_text([cell]), encoding="utf-8")
        words = ["-m", "gpipe_bench", "run", "--cells", str(cells), "--repeat", str(repeat), "--out", str(out)]
        status = _run([*launcher, *words], rank_environment(cell, os.environ))
        if out.exists():
            return RawResult.read(out)
    raise PeerError(f"rank 0 must write a result, got none from torchrun, which ended with {status}; its log says more")


def launch_command(cell: MeasuredCell, environment: Mapping[str, str]) -> list[str]:
    """What starts a command in each rank of ``cell``: torchrun, on each of several hosts by srun.

    Raises:
        ConfigError: several hosts outside a job of Slurm.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(cell.processes // cell.hosts)]
    if cell.hosts == 1:
        return [*torchrun, "--standalone", "--local-addr", "localhost"]
    if "SLURM_JOB_ID" not in environment:
        rule = f"hosts must be 1 where neither torchrun nor a job of Slurm runs this command, got {cell.hosts}"
        raise ConfigError([f"{rule}; start it on each host with torchrun"])
    hosts = str(cell.hosts)
    # The step that asks holds a processor of this host, which the new step may use as well.
    srun = ["srun", "--overlap", "--nodes", hosts, "--ntasks", hosts, "--ntasks-per-node", "1"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{socket.gethostname()}:{_PORT}"]
    return [*srun, *torchrun, "--nnodes", hosts, *meeting, "--rdzv-id", environment["SLURM_JOB_ID"]]


def rank_environment(cell: MeasuredCell, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the ranks: those of this process, without what srun would take for the size of its new step."""
    kept = {name: value for name, value in environment.items() if not name.startswith("SLURM_") or name in _OF_JOB}
    # On one host ranks talk over loopback, whatever its name resolves to.
    network = {"GLOO_SOCKET_IFNAME": "lo"} if cell.hosts == 1 and _LOOPBACK.exists() else {}
    return {"OMP_NUM_THREADS": str(cell.threads), **network, **kept}


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``command``; if this process is interrupted or ends, end it with all that it has started."""
    # An interrupt of the terminal comes here alone: torchrun ends its ranks at the first signal, but not at a second.
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    ending = partial(end_with, os.getpid(), signal.SIGTERM)
    child = subprocess.Popen(
        command,
        env=dict(environment),
        start_new_session=True,
        preexec_fn=ending,  # noqa: PLW1509 - no other thread of this process holds a lock
        **streams,
    )
    try:
        return child.wait()
    finally:
        child.terminate()
        child.wait()


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that measure a cell together; by default this one alone."""

    rank: int = 0
    size: int = 1

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in each of them."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def owners(self, values: Sequence[T], placement: Sequence[int]) -> list[T]:
        """Of values for each partition those of the rank that has it, as ``placement`` says."""
        parts = self.gather(values)
        return [parts[rank if self.size > 1 else 0][j] for j, rank in enumerate(placement)]


@contextmanager
def joined(cell: MeasuredCell) -> Iterator[Ranks]:
    """The ranks of ``cell``, of which this process is one, while they measure."""
    if cell.processes == 1:
        yield Ranks()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=_PATIENCE)
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    if ranks.rank == 0:
        # torchrun ends all ranks when one is killed. This one has its row to write first, which takes a moment.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()
