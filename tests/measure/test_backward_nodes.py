"""Which partition an autograd node belongs to, on graphs made by hand."""

import weakref

import pytest
import torch
from torch.autograd import Function

from gpipe_bench.measure.memory import BackwardNodes


class At(Function):
    """Passes a tensor on; calls something when the backward pass comes by."""

    @staticmethod
    def forward(ctx, data, call):
        ctx.call = call
        return data.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


class Graph:
    """Notes, in the order of the backward pass, whose node runs."""

    def __init__(self):
        self.nodes = BackwardNodes()
        self.seen = []

    def begin(self, data, owner):
        return At.apply(data, lambda: self.nodes.begin(owner))

    def look(self, data):
        return At.apply(data, lambda: self.seen.append(self.nodes.current()))


@pytest.fixture
def leaf():
    return torch.ones(1, requires_grad=True)


def test_a_node_belongs_to_the_partition_whose_backward_pass_came_last(leaf):
    graph = Graph()
    first = graph.begin(graph.look(graph.look(leaf)), 0)
    graph.look(graph.begin(graph.look(first), 1)).backward()
    assert graph.seen == [None, 1, 0, 0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_node_that_two_partitions_reach_belongs_to_the_earlier_one(leaf, order):
    graph = Graph()
    middle = graph.look(leaf)
    torch.autograd.backward([graph.begin(middle, owner) for owner in order], [torch.ones(1)] * 2)
    assert graph.seen == [0]


def test_the_accumulation_of_a_parameter_s_gradient_belongs_to_nobody(leaf):
    graph = Graph()
    leaf.register_post_accumulate_grad_hook(lambda _: graph.seen.append(graph.nodes.current()))
    graph.begin(leaf.exp(), 1).backward()
    assert graph.seen == [None]


def test_a_graph_with_many_paths_is_walked_once(leaf):
    graph, data = Graph(), leaf
    for _ in range(200):
        data = data + data
    # 2^200 paths: walking each of them would never end
    graph.begin(graph.look(data), 0).backward()
    assert graph.seen == [0]


def test_outside_a_backward_pass_there_is_no_node_and_nothing_is_held(leaf):
    graph = Graph()
    end = graph.begin(leaf.exp(), 0)
    node = weakref.ref(end.grad_fn)
    end.backward()
    del end
    assert node() is not None
    assert graph.nodes.current() is None
    assert node() is None


def test_a_beginning_outside_a_backward_pass_is_none():
    nodes = BackwardNodes()
    nodes.begin(0)
    assert nodes.current() is None
