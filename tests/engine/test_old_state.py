"""Weights that older pipelines saved load under the names of the plain module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench import Pipe, renamed_state_dict


def layers():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 1))


def old_names(module):
    """Names of a pipeline of two partitions in which the second layer was wrapped as a skippable."""
    names = {
        "0.": "partitions.0.0.",
        "1.": "partitions.0.1.module.",
        "2.0.": "partitions.1.0.",
        "3.": "partitions.1.2.",
    }
    return {
        next(new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)): tensor
        for name, tensor in module.state_dict().items()
    }


@pytest.mark.parametrize("wrap", [lambda module: module, Pipe])
def test_weights_are_found_by_their_place(wrap):
    trained, fresh = layers(), layers()
    fresh.load_state_dict(renamed_state_dict(old_names(trained), wrap(fresh)))
    torch.testing.assert_close(dict(fresh.state_dict()), dict(trained.state_dict()), rtol=0, atol=0)


def test_gathered_sums_of_a_deferred_batch_normalisation_are_left_out():
    trained, fresh = layers(), layers()
    state = {}
    for name, tensor in old_names(trained).items():
        state[name] = tensor
        if name.endswith("num_batches_tracked"):
            layer = name.rpartition(".")[0]
            state |= {f"{layer}.sum": torch.zeros(3), f"{layer}.sum_squares": torch.zeros(3)}
    assert renamed_state_dict(state, fresh).keys() == fresh.state_dict().keys()


def test_other_layers_are_refused():
    state = old_names(layers())
    with pytest.raises(ValueError, match="must have the 11 entries of the module, got 1; pass"):
        renamed_state_dict({"a.weight": torch.zeros(1)}, layers())
    state["partitions.1.2.weight"] = torch.zeros(1, 4)
    with pytest.raises(ValueError, match=r"got 'partitions.1.2.weight' of shape \[1, 4\] in the place of '3.weight'"):
        renamed_state_dict(state, layers())
