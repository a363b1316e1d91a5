"""What the calls of a seed give in plain modules, one for each replica."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn

from tests.distributed.seeded import TRAINING, Case, Topology
from tests.distributed.seeded_layers import Norm, Signs, squares


class Reference:
    """A plain module and its optimizer for each replica.

    Args:
        case: what a seed draws.
        topology: says how a batch is cut, and how many replicas there are.
        models: trained ones; default: as they are made.
        optimizers: of these.
    """

    def __init__(self, case: Case, topology: Topology, models: Any = None, optimizers: Any = None) -> None:
        self._case, self._topology = case, topology
        self.models = models or [case.model() for _ in topology.grid]
        self.optimizers = optimizers or [Signs(model.parameters()) for model in self.models]

    def resumed(self, topology: Topology) -> Self:
        """The first replica as all those of another topology."""
        made = [copy.deepcopy((self.models[0], self.optimizers[0])) for _ in topology.grid]
        return type(self)(self._case, topology, *zip(*made, strict=True))

    def call(self, number: int, call: str) -> list[dict[str, Any]]:
        """For each replica what a call gives: a loss, an output or a norm, and the state after it."""
        found = [self._call(replica, number, call) for replica in range(len(self.models))]
        if call in TRAINING:
            _average(self.models)
        for model, optimizer, result in zip(self.models, self.optimizers, found, strict=True):
            if call in TRAINING and call != "hold":
                optimizer.step()
            result["state"] = state_of(model, optimizer)
        return found

    def _call(self, replica: int, number: int, call: str) -> dict[str, Any]:
        case, model = self._case, self.models[replica]
        x, target = case.batch(number, replica)
        if call == "clip":
            return {"norm": nn.utils.clip_grad_norm_(model.parameters(), 1e30)}
        model.train(call != "infer")
        if call in ("evaluate", "infer"):
            with torch.no_grad():
                return {"output": self._output(model, x)}
        if call == "load":
            model.load_state_dict(case.model(version=number + 1).state_dict())
        if call not in ("add", "hold"):
            model.zero_grad()
        output = self._output(model, x)
        loss = squares(output, target)
        if loss.requires_grad:
            loss.backward()
        return {"loss": loss.detach(), "output": output.detach(), "x": x.grad}

    def _output(self, model: nn.Module, x: Tensor) -> Tensor:
        """Of a batch; only normalization is micro-batch by micro-batch."""
        norms = [each for each in model.modules() if isinstance(each, Norm)]
        if not norms:
            return model(x)
        for norm in norms:
            norm.gathered = [] if self._case.deferred else None
        output = torch.cat([model(part) for part in self._case.cut(x, self._topology.chunks)])
        for norm in norms:
            norm.commit()
        return output


def _average(models: list[nn.Module]) -> None:
    """Give the gradients of all models their mean; halves and quarters of whole numbers are exact."""
    for weights in zip(*(model.parameters() for model in models), strict=True):
        if weights[0].grad is not None:
            mean = torch.stack([weight.grad for weight in weights]).sum(0) / len(models)
            for weight in weights:
                weight.grad = mean.clone()


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of (gradient, value, momentum) of all weights, and of the values of all buffers."""

    def copied(value: Any) -> Any:
        return None if value is None else value.detach().clone()

    weights = {
        # A checkpoint holds no momentum of a frozen weight.
        name: (copied(each.grad), copied(each), copied(optimizer.state[each].get("momentum")))
        for name, each in module.named_parameters(remove_duplicate=False)
    }
    return weights | {name: (None, copied(each), None) for name, each in module.named_buffers()}


def expected(case: Case) -> list[list[dict[str, Any]]]:
    """For each call and replica what it should give."""
    reference = Reference(case, case.first)
    return [reference.call(number, call) for number, call in enumerate(case.calls)]


def expected_again(case: Case, *, loaded: bool) -> list[dict[str, Any]]:
    """For each replica what a step of the second topology should give, from the checkpoint or the beginning."""
    reference = Reference(case, case.first if loaded else case.second)
    if loaded:
        for number, call in enumerate(case.calls[: (case.saved_after or 0) + 1]):
            reference.call(number, call)
        reference = reference.resumed(case.second)
    return reference.call(0, "step")
