"""One step of a U-Net on four virtual P40s: the engine runs, nothing is computed, and time is virtual."""

from gpipe_bench.emulator import emulate
from gpipe_bench.simulator import Model

step = emulate(
    Model("unet", {"depth": 5, "B": 5, "C": 64, "size": 192}),
    balance=[34, 76, 70, 61],
    batch_size=128,
    chunks=8,
    profile="p40",
)
print(f"{step.throughput_samples_per_s:.1f} samples/s emulated, {step.peak_reserved_gib:.1f} GiB reserved")
