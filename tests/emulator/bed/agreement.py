"""How many of PyTorch's own operator samples give on a virtual device what they give on the CPU.

    python -m tests.emulator.bed.agreement              all operators, about 15 s
    python -m tests.emulator.bed.agreement --every 10   each tenth

PyTorch describes its operators for its own tests (OpInfo): names, sample arguments, what has a gradient. Samples are
float32; forward results and gradients are compared. Random numbers come from equal seeds. Operators that return
uninitialised memory are compared by shape and type. On PyTorch 2.13: 668 of 671 agree, all but sparse_sampled_addmm and
sparse_mm_reduce (no sparse tensors) and tensor_split (which wants its indices on the CPU, on every accelerator).
"""

from __future__ import annotations

import argparse
import sys
import types
import unittest
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gpipe_bench.emulator.library import leave, load

__all__ = ["Verdict", "judge", "judge_all", "operators", "report"]

DEVICE = "virtual:1"


def operators() -> list[Any]:
    """PyTorch's descriptions of its operators, those with float32 samples."""
    try:
        import expecttest  # noqa: F401 - PyTorch's test package imports it at its start
    except ImportError:
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an operator did.

    Attributes:
        operator: its name.
        how: ``values``, ``shapes`` or, where the CPU itself refuses all samples, ``nothing`` was compared.
        problem: what differs first, or None.
    """

    operator: str
    how: str
    problem: str | None


def judge(op: Any, most: int = 5) -> Verdict:
    """Compare the first ``most`` samples of an operator."""
    gradient = op.supports_autograd
    torch.manual_seed(0)
    how = "nothing"
    for index, sample in enumerate(islice(op.sample_inputs("cpu", torch.float32, requires_grad=gradient), most)):
        given = (sample.input, sample.args, sample.kwargs)
        try:
            expected = _run(op, tree_map(_copied, given), gradient)
        except Exception:  # noqa: BLE001 - no disagreement
            continue
        how = "shapes" if _uninitialised(op) else "values"
        try:
            _compare(_run(op, tree_map(_moved, given), gradient), expected, by_value=how == "values")
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is the answer
            first = str(error).strip().split("\n")[0]
            return Verdict(op.formatted_name, how, f"sample {index}: {type(error).__name__}: {first}")
    return Verdict(op.formatted_name, how, None)


def _compare(found: list[Any], expected: list[Any], *, by_value: bool) -> None:
    for one, other in zip(found, expected, strict=True):
        if not isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
        elif by_value:
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5, equal_nan=True)
        else:
            same = (one.shape, one.dtype) == (other.shape, other.dtype)
            assert same, f"{one.shape} {one.dtype} is not {other.shape} {other.dtype}"


def _uninitialised(op: Any) -> bool:
    return "empty" in op.name


def _run(op: Any, given: tuple[Any, Sequence[Any], dict[str, Any]], gradient: bool) -> list[Any]:
    first, args, kwargs = given
    torch.manual_seed(3)
    results = tree_leaves(op(first, *args, **kwargs))
    leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    roots = [root for root in results if isinstance(root, torch.Tensor) and root.requires_grad]
    if gradient and roots and leaves:
        grads = torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)
        results += grads
    return [value.detach() if isinstance(value, torch.Tensor) else value for value in results]


def _copied(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(DEVICE).requires_grad_(value.requires_grad)
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device(DEVICE)
    return value


def judge_all(chosen: Iterable[Any]) -> list[Verdict]:
    """Compare operators, without the warnings that some of their samples give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [judge(op) for op in chosen]


def report(verdicts: Sequence[Verdict]) -> str:
    """The figures, and who disagrees."""
    compared = [verdict for verdict in verdicts if verdict.how != "nothing"]
    wrong = [f"{verdict.operator}: {verdict.problem}" for verdict in compared if verdict.problem is not None]
    shapes = sum(verdict.how == "shapes" for verdict in compared)
    summary = (
        f"{len(compared) - len(wrong)} of {len(compared)} operators agree, {shapes} of them compared by shape and type"
    )
    return "\n".join([*wrong, summary])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--every", type=int, default=1, help="only each n-th operator")
    chosen = operators()[:: parser.parse_args().every]
    load()
    torch.set_num_threads(1)
    sys.stdout.write(report(judge_all(chosen)) + "\n")
    leave(0)


if __name__ == "__main__":
    main()
