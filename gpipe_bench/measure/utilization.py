"""How busy devices are: sampled from the driver on CUDA, from the timeline elsewhere.

The two are not one quantity. The driver's is the share of time in which *some* kernel ran, copies excluded: the
figure that papers print. The timeline's is the share in which a task of this partition computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from statistics import fmean
from types import TracebackType
from typing import Any, Self

import pynvml
import torch

from gpipe_bench.measure.devices import distinct_devices
from gpipe_bench.measure.nvml import device_handle, nvml_session
from gpipe_bench.results.breakdown import Breakdown

Probe = Callable[[], float | None]
"""Reads the busy share of one device, in [0, 1]; None when it cannot be read now."""


def busy_share(breakdowns: Sequence[Breakdown]) -> float:
    """Mean over partitions of the share of time in which a computation ran, in [0, 1]."""
    return fmean(breakdown.utilization_fraction for breakdown in breakdowns)


def nvml_probe(nvml: Any, device: torch.device) -> Probe | None:
    """A probe of ``device``, or None where the driver gives no utilisation (no NVIDIA device, or a MIG slice)."""
    handle = None if nvml is None else device_handle(nvml, device)
    if handle is None:
        return None

    def read() -> float | None:
        try:
            return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except pynvml.NVMLError:
            return None

    return None if read() is None else read


class NvmlUtilization:
    """Samples the busy share of devices in a thread of its own, while the context lasts.

    torchgpipe's benchmarks polled nvidia-smi every 50 ms; this asks the same source without a process. The driver
    averages over 1/6 s to 1 s itself: record for seconds, not for single steps.

    Args:
        devices: devices to sample, each distinct one once.
        interval_s: pause between samples.
        probes: one for each distinct device, for sources other than NVML.
    """

    def __init__(
        self,
        devices: Iterable[torch.device | str],
        *,
        interval_s: float = 0.05,
        probes: Sequence[Probe | None] | None = None,
    ) -> None:
        self.devices = distinct_devices(devices)
        self._interval_s = interval_s
        self._given = probes
        self._samples: list[list[float]] = [[] for _ in self.devices]
        self._end = threading.Event()
        self._session = ExitStack()
        self._thread: threading.Thread | None = None

    @property
    def utilization_fractions(self) -> list[float | None]:
        """Mean busy share of each distinct device, in [0, 1]; None where nothing could be sampled."""
        return [fmean(samples) if samples else None for samples in self._samples]

    @property
    def utilization_fraction(self) -> float | None:
        """Mean over the devices; None when one of them could not be sampled."""
        shares = [share for share in self.utilization_fractions if share is not None]
        return fmean(shares) if shares and len(shares) == len(self.devices) else None

    @property
    def samples(self) -> list[list[float]]:
        """The samples of each distinct device."""
        return [list(samples) for samples in self._samples]

    def __enter__(self) -> Self:
        probes = self._given
        if probes is None:
            nvml = self._session.enter_context(nvml_session())
            probes = [nvml_probe(nvml, device) for device in self.devices]
        self._end.clear()
        if any(probe is not None for probe in probes):
            self._thread = threading.Thread(target=self._sample, args=(probes,), name="utilization", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._session.close()

    def _sample(self, probes: Sequence[Probe | None]) -> None:
        # The pause comes first: what the driver says at the start describes the time before.
        ended = False
        while not ended:
            ended = self._end.wait(self._interval_s)
            for samples, probe in zip(self._samples, probes, strict=True):
                share = None if probe is None else probe()
                if share is not None:
                    samples.append(share)
