"""The result of a simulated or emulated training step: times, memory, shares of devices, its trace and its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.machine.replay import DeviceMemory
from gpipe_bench.results.breakdown import Breakdown, mean_breakdown, split_busy_time
from gpipe_bench.results.rows import Row
from gpipe_bench.results.timeline import TimelineEvent
from gpipe_bench.step.timeline import Timeline

if TYPE_CHECKING:
    from gpipe_bench.components import Components
    from gpipe_bench.machine.hardware import HardwareMachine
    from gpipe_bench.machine.profile import Profile
    from gpipe_bench.machine.replay import Replay
    from gpipe_bench.machine.trace import Trace

GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device in a step. Its shares of compute, recompute, copy, bubble and imbalance add up to the step.

    Attributes:
        device: its number.
        peak_live_gib: peak of the bytes of live tensors; None without memory.
        peak_allocated_gib: the same, as the allocator rounds.
        peak_reserved_gib: peak of the allocator's segments.
        utilization_fraction: share of the step in which the device ran anything: a task, or a copy that it sends.
            It is what sampling the driver shows.
        compute_fraction: forward and backward passes.
        recompute_fraction: recomputation.
        copy_fraction: a copy and nothing else.
        bubble_fraction: idle in fill, drain and waiting.
        imbalance_fraction: idle for having less work than the busiest device.
    """

    device: int
    peak_live_gib: float | None
    peak_allocated_gib: float | None
    peak_reserved_gib: float | None
    utilization_fraction: float
    compute_fraction: float
    recompute_fraction: float
    copy_fraction: float
    bubble_fraction: float
    imbalance_fraction: float


@dataclass(frozen=True, slots=True)
class Shortage:
    """A device that is too small.

    Attributes:
        device: the first that was full.
        needed_gib: GiB that the device would need in the step that fails: the peak of its tensors; where the tensors
            would fit, the peak of the segments that the allocator of a larger device reserves for them.
        capacity_gib: GiB that it has for tensors.
        tensors_gib: GiB of tensors at their peak in that step.
        state_gib: GiB of the optimizer's state in that step; 0 in the first step, whose update makes the state.
        first_step: whether the first step fails, and not a later one.
    """

    device: int
    needed_gib: float
    capacity_gib: float
    tensors_gib: float
    state_gib: float
    first_step: bool

    @property
    def text(self) -> str:
        """The shortage in words."""
        needed, capacity = gib_texts(self.needed_gib, self.capacity_gib)
        what = when = ""
        if self.tensors_gib < self.needed_gib:
            what = f" of allocator segments for {gib_texts(self.tensors_gib, self.needed_gib)[0]} of tensors"
        if not self.first_step:
            state = f", with {gib_texts(self.state_gib, 0)[0]} of optimizer state," if self.state_gib else ""
            when = f" in the steps after the first{state}"
        return f"device {self.device} needs {needed}{what}{when} and has {capacity}"


def gib_texts(value: float, other: float, digits: int = 1) -> tuple[str, str]:
    """Two sizes in GiB that differ, with ``digits`` decimals or as many more as show that they do."""
    texts = ((f"{value:.{shown}f} GiB", f"{other:.{shown}f} GiB") for shown in count(digits))
    return next(pair for pair in texts if pair[0] != pair[1])


def guess_words(launch_us: float) -> str:
    """What to say of a step that is bound by a host whose time of a launch nobody measured."""
    return (
        f"the time is a guess: nobody measured this host's time of a launch, {launch_us:g} us is assumed; give it by "
        "--launch-us, or measure a profile"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step that was simulated or emulated, or why there is none; of several steps the one of median length.

    Attributes:
        evidence: ``simulated`` or ``emulated``.
        status: ``ok``, or ``oom`` when a device's memory does not suffice; then there are no times, shares and events.
        reason: with ``oom``, how much was needed and where.
        shortage: the same as numbers.
        throughput_samples_per_s: batch size over step time.
        step_time_ms: of a step that follows another, or from the start when there is but one; the mean where host
            threads race.
        microbatches: m, as the batch gave them.
        devices: use of each device.
        memory: of each device, in bytes; empty without memory.
        events: timeline of the last step, in the order of starts; zero is the end of the step before. The host runs
            ahead, so what it issued before that has a negative time of issue.
        peak_allocated_gib: sum over devices; None without memory.
        peak_reserved_gib: likewise.
        settings: columns of the row that describe model, pipeline and settings.
        host_fraction: share of the step in which the host launches: the busiest thread, or all threads where they share
            an interpreter lock. None where it is not known.
        kernel_fraction: share of the step that the kernels of the busiest device take, one right after the other; None
            likewise. Where the host launches for longer than that, the step is bound by the host.
        guessed_launch_us: host time of a launch, where nobody measured that of this host; else None.
        later_reserved_gib: ``peak_reserved_gib`` after twice as many steps, where it is larger then; else None.
        assumptions: what stands for values that measured layers do not have, a sentence each.
        each: of emulated steps all after the first, in their order; else only this one.
        replay: the trace of all steps, as it ran; None where there is none.
    """

    evidence: str
    status: str
    reason: str = ""
    shortage: Shortage | None = None
    throughput_samples_per_s: float | None = None
    step_time_ms: float | None = None
    microbatches: int
    devices: tuple[DeviceUse, ...] = ()
    memory: tuple[DeviceMemory, ...] = ()
    events: Sequence[TimelineEvent]
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    settings: dict[str, Any]
    host_fraction: float | None = None
    kernel_fraction: float | None = None
    guessed_launch_us: float | None = None
    later_reserved_gib: float | None = None
    assumptions: tuple[str, ...] = ()
    each: tuple[Step, ...] = ()
    replay: Replay | None = field(default=None, repr=False, compare=False)

    @property
    def range_ms(self) -> tuple[float, float] | None:
        """The shortest and the longest step: None where there is none."""
        times = [step.step_time_ms for step in self.each if step.step_time_ms is not None]
        return (min(times), max(times)) if times else None

    @property
    def caveats(self) -> tuple[str, ...]:
        """What makes the numbers less certain than others, a sentence each."""
        found = [*self.assumptions]
        if self.bound_by_host and self.guessed_launch_us is not None:
            found.append(guess_words(self.guessed_launch_us))
        if self.later_reserved_gib is not None and self.peak_reserved_gib is not None:
            before, after = gib_texts(self.peak_reserved_gib, self.later_reserved_gib)
            found.append(
                f"reserved memory has not settled: {before} over all devices, {after} after twice as many steps; "
                "expect the larger one, or give simulate() more steps"
            )
        return tuple(found)

    @property
    def bound_by_host(self) -> bool:
        """Whether the devices wait for the host, so that faster ones would not help."""
        return (self.host_fraction or 0.0) > (self.kernel_fraction or 0.0)

    @property
    def utilization_fraction(self) -> float | None:
        """The mean over devices."""
        return sum(use.utilization_fraction for use in self.devices) / len(self.devices) if self.devices else None

    @property
    def share(self) -> Breakdown | None:
        """The mean split of the step over devices; None when there is none."""
        return mean_share(self.devices) if self.devices else None

    def row(self, **columns: Any) -> Row:
        """The result as a row with its kind of evidence.

        Args:
            columns: further columns, such as ``experiment``; they go before what the simulation knows.
        """
        share = self.share
        values: dict[str, Any] = {
            **self.settings,
            "evidence": self.evidence,
            "status": self.status,
            "reason": self.reason,
            "microbatches": self.microbatches,
            "throughput_samples_per_s": self.throughput_samples_per_s,
            "step_time_ms": self.step_time_ms,
            "peak_allocated_gib": self.peak_allocated_gib,
            "peak_reserved_gib": self.peak_reserved_gib,
        }
        if share is not None:
            values["utilization_fraction"] = self.utilization_fraction
            for name in ("bubble", "copy", "recompute", "imbalance"):
                values[f"{name}_fraction"] = getattr(share, f"{name}_fraction")
        return Row(**{**values, **columns})


def pipeline_facts(components: Components, balance: Sequence[int], profile: Profile, **others: Any) -> dict[str, Any]:
    """The columns of a row that describe pipeline and hardware, and ``others``."""
    return {
        "variant": components.label,
        **{name: getattr(components, name) for name in components.switched()},
        "partitions": len(balance),
        "balance": "-".join(map(str, balance)),
        "device": f"cuda {profile.device}",
        "profile": profile.name,
        # Traces depend on it; how it was built does not matter.
        "torch": version("torch").partition("+")[0],
        **others,
    }


def device_uses(
    memory: Sequence[DeviceMemory], events: Timeline, length_ns: int, device_of: Sequence[int]
) -> tuple[DeviceUse, ...]:
    """The use of each device that has a partition.

    Args:
        memory: of each device; empty without memory.
        events: of one step or several.
        length_ns: of these steps.
        device_of: device of each partition.
    """
    busy, used = events.busy(device_of, length_ns), sorted(set(device_of))
    rows = [busy[device] for device in used]
    shares = split_busy_time(rows, length_ns)
    return tuple(
        DeviceUse(
            device=device,
            peak_live_gib=memory[device].peak_live / GIB if memory else None,
            peak_allocated_gib=memory[device].peak_allocated / GIB if memory else None,
            peak_reserved_gib=memory[device].peak_reserved / GIB if memory else None,
            utilization_fraction=row.occupied / length_ns,
            **asdict(share),
        )
        for device, share, row in zip(used, shares, rows, strict=True)
    )


def busy_ns(trace: Trace, machine: HardwareMachine, first: int = 0, last: int | None = None) -> tuple[int, int]:
    """How long the host launches, and the kernels of the busiest device take, by some rows of a trace.

    The host does so for the busiest device, or for all where its threads share an interpreter lock, and goes through
    the parameters of updates.

    Args:
        trace: of a step or several.
        machine: what launches cost.
        first: the first row.
        last: the row after the last.
    """
    host_ns = machine.host_ns(trace.sums("launches", first, last)) + trace.updating_ns(first, last)
    return host_ns, max(trace.sums("duration_ns", first, last).values(), default=0)


def mean_share(uses: Sequence[DeviceUse]) -> Breakdown:
    """The mean split of the step over devices."""
    return mean_breakdown([Breakdown(*(getattr(use, name) for name in Breakdown.__slots__)) for use in uses])


def summed_gib(bytes_of_devices: Sequence[int]) -> float | None:
    """A number of bytes of all devices; None without memory."""
    return sum(bytes_of_devices) / GIB if bytes_of_devices else None
