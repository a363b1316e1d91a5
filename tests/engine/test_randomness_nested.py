"""Random numbers of layers that recompute by themselves, and of pipelines in layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipe_bench.errors import RandomnessError
from tests.engine.support import MODES

SIZE = 32


# --- layers that recompute by themselves ---------------------------------------------------------------------------


class SelfMade(nn.Module):
    """Dropout of weighted ones under PyTorch's own checkpoint, so that gradient and output must be equal."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return nn.functional.dropout(x * self.weight, 0.5)

        return torch_checkpoint(run, x, use_reentrant=self.reentrant)


def input_and_output(pipe: nn.Module) -> tuple[Tensor, Tensor]:
    x = torch.ones(8, SIZE).requires_grad_()
    output = pipe(x)
    output.sum().backward()
    return x.grad, output.detach()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_mask_that_a_layer_would_recompute_by_itself_is_refused(either, checkpoint, reentrant):
    layers = nn.Sequential(SelfMade(reentrant=reentrant), SelfMade(reentrant=reentrant))
    pipe = either(layers, [1, 1], chunks=4, checkpoint=checkpoint)
    with pytest.raises(RandomnessError, match=r"got a draw within torch\.utils\.checkpoint in a layer"):
        input_and_output(pipe)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_may_recompute_by_itself_where_tasks_run_one_by_one(either, reentrant):
    layers = nn.Sequential(SelfMade(reentrant=reentrant), SelfMade(reentrant=reentrant))
    gradient, output = input_and_output(either(layers, [2], chunks=4, checkpoint="never"))
    assert torch.equal(gradient, output)


class Nested(nn.Module):
    """A layer that runs its input through a pipeline of its own."""

    def __init__(self, either, *, random: bool) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.5 if random else 0.0))
        self.pipe = either(inner, [1, 1], chunks=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pipe(x)


@pytest.mark.parametrize("checkpoint", MODES)
def test_masks_of_a_pipeline_in_a_layer_are_refused(either, checkpoint):
    pipe = either(
        nn.Sequential(Nested(either, random=True), Nested(either, random=True)), [1, 1], chunks=4, checkpoint=checkpoint
    )
    with pytest.raises(RandomnessError, match="got a draw within a pipeline in a layer"):
        input_and_output(pipe)


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_pipeline_in_a_layer_may_compute_what_is_not_random(either, checkpoint):
    layers = nn.Sequential(Nested(either, random=False).eval(), Nested(either, random=False).eval())
    plain = nn.Sequential(*(nn.Sequential(*layer.pipe) for layer in copy.deepcopy(layers)))
    found = input_and_output(either(layers, [1, 1], chunks=4, checkpoint=checkpoint))
    torch.testing.assert_close(found, input_and_output(plain))
