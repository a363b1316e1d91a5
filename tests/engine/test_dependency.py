"""Fork, Join and phonies by themselves: they change order, never values."""

from __future__ import annotations

import torch
from torch import Tensor

from gpipe_bench.engine.nodes import behind, get_phony, new_leaf
from gpipe_bench.engine.paper.dependency import Join, fork
from tests.engine.support import Identity

CPU = torch.device("cpu")


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


# --- phonies -------------------------------------------------------------------------------------------------------


def test_a_phony_is_empty_and_made_once():
    phony = get_phony(CPU)
    assert (phony.shape, phony.device, phony.requires_grad) == ((0,), CPU, False)
    assert get_phony(CPU) is phony


def test_a_phony_made_in_inference_mode_serves_training():
    with torch.inference_mode():
        assert not get_phony(torch.device("meta")).is_inference()


def test_each_leaf_is_its_own():
    one, other = new_leaf(CPU), new_leaf(CPU)
    assert one is not other
    assert (one.shape, one.requires_grad, one.is_leaf) == ((0,), True, True)


# --- values --------------------------------------------------------------------------------------------------------


def test_fork_and_join_change_no_value_and_no_gradient():
    x, y = leaf(1.0, 2.0), leaf(3.0)
    (x_forked,), phony = fork((x,))
    (y_joined,) = behind(Join, (y,), phony)
    torch.testing.assert_close([x_forked.detach(), y_joined.detach()], [x.detach(), y.detach()])
    (3 * x_forked.sum() + 5 * y_joined.sum()).backward()
    torch.testing.assert_close([x.grad, y.grad], [torch.full((2,), 3.0), torch.full((1,), 5.0)])


def test_all_differentiable_tensors_go_through_one_node_and_the_rest_past_it():
    integers, constant = torch.tensor([1]), torch.tensor([1.0])
    x, y = leaf(1.0), leaf(2.0)
    values, phony = fork((integers, x, constant, "text", y, None))
    assert values[0] is integers
    assert values[2] is constant
    assert values[3:4] + values[5:] == ("text", None)
    assert values[1].grad_fn is values[4].grad_fn is phony.grad_fn


def test_results_are_no_aliases_in_autograds_eyes():
    """A user's function that returns its input unchanged works behind them."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad

    x = leaf(1.0)
    (forked,), phony = fork((x,))
    (joined,) = behind(Join, (Same.apply(forked),), phony)
    Same.apply(joined).backward()
    assert x.grad == 1


def test_a_join_leaves_alone_what_needs_no_gradient():
    """A gradient would be computed for it, and for all that it was made from."""
    (_, phony) = fork((leaf(1.0),))
    integers, constant = torch.tensor([1]), torch.ones(1)
    joined = behind(Join, (integers, constant, "text", leaf(2.0)), phony)
    assert joined[0] is integers
    assert joined[1] is constant
    assert joined[2] == "text"
    assert joined[3].requires_grad


def test_no_gradient_no_fork():
    values, phony = fork((torch.ones(1), torch.tensor([1])))
    assert phony is None
    assert not values[0].requires_grad


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


def test_without_an_edge_what_was_made_last_comes_first():
    log: list[str] = []
    first = Identity.apply(leaf(1.0), lambda: log.append("first"))
    second = Identity.apply(leaf(1.0), lambda: log.append("second"))
    (second + first).backward()
    assert log == ["second", "first"]


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
