"""Zero-bubble schedules: 1F1B with the backward pass split, so that weights' gradients fill the bubble."""

from __future__ import annotations

from gpipe_bench.schedules.actions import Action, Schedule
from gpipe_bench.schedules.filling import fill

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(m: int, n: int) -> Schedule:
    """ZB-H1 (Qi et al., Zero Bubble, arXiv 2401.10241, section 2.2).

    With m = 4 and n = 3:

        device 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
        device 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        device 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    No device holds more activations than the first device of 1F1B, which is n. The bubble is a third of 1F1B's where
    T_F = T_B = T_W.

    Args:
        m: micro-batches.
        n: partitions, one on each device.
    """
    return fill([_one_f_one_b(m, n - j, j) for j in range(n)], n)


def zb_h2(m: int, n: int) -> Schedule:
    """ZB-H2 (Qi et al., Zero Bubble, arXiv 2401.10241, section 2.3).

    With m = 5 and n = 3:

        device 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        device 1     F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        device 2        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

    Each device works without a pause from its first to its last action where T_F = T_B = T_W, and holds up to 2 n - 1
    activations. That is faster than ZB-H1 where a device starts the next batch without waiting for the others.

    Args:
        m: micro-batches.
        n: partitions, one on each device.
    """
    return fill([_one_f_one_b(m, 2 * (n - j) - 1, j) for j in range(n)], 2 * n - 1)


def _one_f_one_b(m: int, warm_up: int, j: int) -> list[Action]:
    """F and I of partition j: ``warm_up`` times F, then I and F in turn, then the remaining I."""
    forward, inputs = ([Action(kind, i, j) for i in range(m)] for kind in "FI")
    row = forward[:warm_up]
    for i, ahead in enumerate(forward[warm_up:]):
        row += [inputs[i], ahead]
    return row + inputs[len(forward[warm_up:]) :]
