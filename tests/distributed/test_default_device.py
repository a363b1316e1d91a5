"""A default device that holds no numbers changes nothing: each tensor of the pipeline's own says where it is."""

from __future__ import annotations

from itertools import product

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from gpipe_bench.distributed import Pipe
from tests.distributed.ranks import run_processes


class Block(nn.Module):
    """Draws numbers, and has a parameter without a gradient."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.unused = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        return functional.dropout(self.norm(self.linear(x)))


def reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def trained(rank):
    """All that four processes find, without a default device and with one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    x, found = torch.rand(8, 4), {}
    for device, (schedule, balance) in product((None, "meta"), (("1f1b", [2, 2]), ("zb_v", [1] * 4))):
        torch.manual_seed(3)
        with torch.device("meta"):
            layers = nn.Sequential(*(Block() for _ in range(4)))
        torch.set_default_device(device)
        groups = {"mesh": mesh["pipeline"], "replicas": mesh["data"]}
        options = {"chunks": 4, "schedule": schedule, "deferred_batch_norm": True, "materialise": reset}
        pipe = Pipe(layers, balance, **groups, **options)
        values = [pipe.clip_grad_norm_(1.0)]
        for _ in range(2):
            values.append(pipe.step(x, x, functional.mse_loss))
            values.append(pipe.clip_grad_norm_(1e-3))
        with torch.no_grad():
            values.append(pipe(x))
        values += [each.grad for each in pipe.parameters()]
        found.setdefault((schedule, *balance), []).append([*values, *pipe.state_dict().values(), torch.get_rng_state()])
        pipe.close()
        torch.set_default_device(None)
    return list(found.values())


def test_a_default_device_changes_nothing(tmp_path):
    for found in run_processes(4, tmp_path, trained):
        assert isinstance(found, list), found
        for without, with_one in found:
            assert len(without) == len(with_one)
            for one, other in zip(without, with_one, strict=True):
                assert one is other is None or torch.equal(one, other)
