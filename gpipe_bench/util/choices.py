"""The values that a setting can have; what checks, completes or describes a setting takes them from here."""

from __future__ import annotations

from typing import Final, Literal, get_args

Checkpoint = Literal["always", "except_last", "never"]
Transfer = Literal["direct", "host"]
Workers = Literal["always", "never"]
Backward = Literal["autograd", "scheduled"]
Flavour = Literal["current", "published"]
Precision = Literal["float32", "float16", "bfloat16"]
Optimizer = Literal["sgd", "momentum", "rmsprop", "adam", "adamw"]

CHECKPOINT_MODES: Final[tuple[str, ...]] = get_args(Checkpoint)
"""Which micro-batches are recomputed."""

TRANSFERS: Final[tuple[str, ...]] = get_args(Transfer)
"""How tensors cross partitions: from device to device, or through pinned memory of the host."""

WORKERS: Final[tuple[str, ...]] = get_args(Workers)
"""Whether threads of their own issue the work of partitions."""

BACKWARDS: Final[tuple[str, ...]] = get_args(Backward)
"""What orders the backward pass: autograd without a schedule, and a schedule if there is one."""

FLAVOURS: Final[tuple[str, ...]] = get_args(Flavour)
"""Autograd engines, see :mod:`gpipe_bench.simulator.steps.lanes`."""

PRECISIONS: Final[tuple[str, ...]] = get_args(Precision)
"""Types of weights, activations and gradients in simulations; the first leaves the model's own."""

HALVES: Final = PRECISIONS[1:]
"""Those of 16 bits."""

OPTIMIZERS: Final[tuple[str, ...]] = get_args(Optimizer)
"""What updates the parameters."""
