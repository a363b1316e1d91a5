"""One workload in one setting."""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_bench.schedules.table import shared_devices
from studies.peers.contenders import Contender


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCase:
    """What every contender runs.

    Attributes:
        workload: cells, convnet, unet or decoder.
        model: name of the model.
        model_args: its arguments.
        partitions: n, of contenders with one partition per device.
        chunks: m; the batch is a multiple of it.
        checkpoint: always, except_last or never.
        batch_size: samples per step.
        balance: layers per partition; empty: to be found by measuring.
        fine_balance: the same for contenders with two partitions per device, so twice as many.
        rounds: of the race.
        visit_s: seconds of timed steps in a round; at least one step, however long it is.
        seed: of weights and data.
        device: cpu or cuda.
        devices: how many of them; the CPU counts as one.
        cores: CPU cores that may be used.
        precision: of weights and batch.
    """

    workload: str
    model: str
    model_args: str
    partitions: int
    chunks: int
    checkpoint: str
    batch_size: int
    balance: tuple[int, ...] = ()
    fine_balance: tuple[int, ...] = ()
    rounds: int = 1
    visit_s: float = 0.0
    seed: int = 0
    device: str = "cpu"
    devices: int = 1
    cores: int = 1
    precision: str = "float32"

    @property
    def id(self) -> str:
        """Readable name, unique in a race."""
        return f"{self.workload} n={self.partitions} m={self.chunks} {self.checkpoint}"

    @property
    def cells(self) -> int:
        """(micro-batch, partition) cells of a step."""
        return self.chunks * self.partitions

    @property
    def parallel(self) -> int:
        """How many partitions can compute at once."""
        return min(self.partitions, self.cores if self.device == "cpu" else self.devices)

    @property
    def loops(self) -> int:
        """How many loops that share the micro-batches run at once to see what the cores, or devices, do together."""
        return min(self.parallel, self.chunks)

    def processes(self, contender: Contender) -> int:
        """How many processes a contender has."""
        if contender.process_per_device:
            return self.partitions
        return self.loops if contender.kind == "loops" else 1

    def partition_devices(self) -> list[str]:
        """The device of each partition: neighbours share one when there are fewer devices than partitions."""
        if self.device == "cpu":
            return ["cpu"] * self.partitions
        return [f"{self.device}:{k}" for k in shared_devices(self.partitions, self.devices)]
