"""Fork, Join and phonies by themselves: they change order, never values."""

from __future__ import annotations

import torch
from torch import Tensor

from gpipe_bench.autograd.nodes import behind, get_phony
from gpipe_bench.engine.paper.dependency import Join, fork
from tests.engine.support import Identity

CPU = torch.device("cpu")


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


# --- phonies -------------------------------------------------------------------------------------------------------


def test_a_phony_made_in_inference_mode_serves_training():
    with torch.inference_mode():
        assert not get_phony(torch.device("meta")).is_inference()


# --- values --------------------------------------------------------------------------------------------------------


def test_all_differentiable_tensors_go_through_one_node_and_the_rest_past_it():
    integers, constant = torch.tensor([1]), torch.tensor([1.0])
    x, y = leaf(1.0), leaf(2.0)
    values, phony = fork((integers, x, constant, "text", y, None))
    assert values[0] is integers
    assert values[2] is constant
    assert values[3:4] + values[5:] == ("text", None)
    assert values[1].grad_fn is values[4].grad_fn is phony.grad_fn


def test_an_output_without_gradient_stays_without():
    """None, not zeros: a defined gradient would make autograd synchronise streams."""
    used, unused = leaf(1.0), leaf(1.0)
    (used_forked, unused_forked), _ = fork((used, unused))
    assert unused_forked.requires_grad
    used_forked.backward()
    assert (used.grad, unused.grad) == (torch.ones(1), None)


def test_a_phony_gets_no_gradient():
    seen = []
    (forked,), phony = fork((leaf(1.0),))
    phony.grad_fn.register_prehook(lambda grads: seen.append(grads[-1]))
    (joined,) = behind(Join, (leaf(1.0),), phony)
    (forked + joined).backward()
    assert seen == [None]


# --- order ---------------------------------------------------------------------------------------------------------


def test_a_fork_waits_for_its_join():
    """The joined chain was made last but is long; the fork's owner must wait for all of it."""
    log: list[str] = []
    first = Identity.apply(leaf(1.0), lambda: log.append("first"))
    (first,), phony = fork((first,))
    second = leaf(1.0)
    (second,) = behind(Join, (second,), phony)
    for k in range(3):
        second = Identity.apply(second, lambda k=k: log.append(f"second {k}"))
    # made last: would come first
    first = Identity.apply(first, lambda: log.append("after the fork"))
    (first + second).backward()
    assert log == ["after the fork", "second 2", "second 1", "second 0", "first"]
