"""AmoebaNet-D as an ``nn.Sequential`` of cells, in the form in which GPipe and torchgpipe benchmarked it.

    image ─ stem ─ reduction ─ reduction ─ L/3 normal ─ reduction ─ L/3 normal ─ reduction ─ L/3 normal ─ classifier

Real et al. (arXiv 1802.01548) evolved the cells; GPipe (arXiv 1811.06965, section 3) scaled them as AmoebaNet-D (L, D):
L normal cells, D filters. A cell takes (s1, s2), the outputs of the cell before and of the one before that, and gives
(its own output, s1), so between cells travels a plain tuple of two tensors and no skip connection is needed.

Inside a cell, state 0 is s1 and state 1 is s2, both brought to the cell's channels; state 2 + k is the sum of the
two operations in line k of the cell's genotype, each applied to an earlier state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpipe_bench.models.amoebanet_operations import FactorizedReduction, operation, relu_conv_norm

Edge = tuple[int, str]
Genotype = tuple[tuple[Edge, Edge], ...]
States = tuple[Tensor, Tensor]

# Five new states, each the sum of two operations: (state that it reads, operation).
NORMAL: Final[Genotype] = (
    ((1, "1x1"), (1, "max3")),
    ((1, "none"), (0, "1x7_7x1")),
    ((0, "1x1"), (0, "1x7_7x1")),
    ((2, "max3"), (2, "none")),
    ((1, "avg3"), (5, "1x1")),
)
REDUCTION: Final[Genotype] = (
    ((0, "max2"), (0, "max3")),
    ((2, "none"), (1, "3x3")),
    ((2, "1x7_7x1"), (2, "max3")),
    ((3, "none"), (1, "max2")),
    ((2, "avg3"), (3, "1x1")),
)
REDUCTION_CONCAT: Final = (4, 5, 6)


@dataclass(frozen=True, slots=True)
class Quirks:
    """Where the published runs differ from the papers. On, the default, is as published.

    Attributes:
        max3_is_average: the pool that the genotypes call a 3x3 maximum takes the average, padding not counted. Off:
            the maximum.
        concat_0346: a normal cell concatenates states 0, 3, 4 and 6, as the TPU reference implementation does and as
            the published parameter counts require. Off: states 4, 5 and 6, as printed; state 3 then leads nowhere.
        stem_relu: the stem applies ReLU to the image, like every other convolution. Off: it does not.
    """

    max3_is_average: bool = True
    concat_0346: bool = True
    stem_relu: bool = True

    @property
    def normal_concat(self) -> tuple[int, ...]:
        """The states that a normal cell concatenates."""
        return (0, 3, 4, 6) if self.concat_0346 else (4, 5, 6)


class Cell(nn.Module):
    """A normal or a reduction cell; a reduction cell halves height and width.

    Args:
        genotype: the two operations of each new state.
        concat: the states that make the output.
        before: channels of (s1, s2).
        channels: channels of every state inside.
        stride: of the operations that read state 0 or 1.
        after_reduction: whether the cell before was a reduction, so that s2 has twice the height and width of s1.
        quirks: see :class:`Quirks`.
    """

    def __init__(
        self,
        genotype: Genotype,
        concat: tuple[int, ...],
        before: tuple[int, int],
        channels: int,
        *,
        stride: int,
        after_reduction: bool,
        quirks: Quirks,
    ) -> None:
        super().__init__()
        edges = [edge for pair in genotype for edge in pair]
        self.reads = tuple(state for state, _ in edges)
        self.concat = concat
        self.enter1: nn.Module = relu_conv_norm(before[0], channels)
        self.enter2: nn.Module = nn.Identity()
        if after_reduction:
            self.enter2 = FactorizedReduction(before[1], channels)
        elif before[1] != channels:
            self.enter2 = relu_conv_norm(before[1], channels)
        self.operations = nn.ModuleList(
            operation(name, channels, stride if state < 2 else 1, max3_is_average=quirks.max3_is_average)
            for state, name in edges
        )

    def forward(self, *given: Tensor | States) -> States:
        """Map s1 and s2, as a tuple or one by one, or one tensor that stands for both, to (output, s1).

        The output has ``len(concat) * channels`` channels, and the height and width of s1 over ``stride``.
        """
        s1, s2 = _states(given)
        inside: list[Tensor] = [self.enter1(s1), self.enter2(s2)]
        for k in range(0, len(self.reads), 2):
            left = self.operations[k](inside[self.reads[k]])
            right = self.operations[k + 1](inside[self.reads[k + 1]])
            inside.append(left + right)
        return torch.cat([inside[state] for state in self.concat], dim=1), s1


class Classifier(nn.Module):
    """Average pool, then a linear layer on what is left.

    Args:
        channels: channels of s1.
        classes: number of classes.
        pool: height and width of s1; 7 for images of 224 x 224.
    """

    def __init__(self, channels: int, classes: int, pool: int) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(pool)
        self.linear = nn.Linear(channels, classes)

    def forward(self, *given: Tensor | States) -> Tensor:
        """Map s1 and s2 to logits of shape (N, classes)."""
        s1, _ = _states(given)
        logits: Tensor = self.linear(self.pool(s1).flatten(1))
        return logits


def _states(given: tuple[Tensor | States, ...]) -> States:
    """The two states, which an ``nn.Sequential`` hands on in a tuple, and a ``Pipe`` one by one."""
    states: Any = given[0] if len(given) == 1 else given
    return states if isinstance(states, tuple) else (states, states)


def amoebanet_d(
    layers: int = 18,
    channels: int = 256,
    *,
    classes: int = 1000,
    size: int = 224,
    quirks: Quirks | None = None,
) -> nn.Sequential:
    """AmoebaNet-D (L, D): stem, L normal and 4 reduction cells, classifier; L + 6 layers.

    Input (N, 3, size, size); output (N, classes).

    Args:
        layers: normal cells, L; a multiple of 3.
        channels: filters, D; a multiple of 8. The stem has D/4, and each reduction doubles them.
        classes: number of classes.
        size: height and width of the images, a multiple of 32; it sets the classifier's pool.
        quirks: where the published runs differ from the papers; all on by default.
    """
    quirks = Quirks() if quirks is None else quirks
    width = channels // 4
    stem = relu_conv_norm(3, width, kernel=3, stride=2, padding=1)
    named: list[tuple[str, nn.Module]] = [("stem", stem if quirks.stem_relu else stem[1:])]
    before, after_reduction = (width, width), False
    for name, is_reduction in _plan(layers):
        width *= 2 if is_reduction else 1
        genotype, concat = (REDUCTION, REDUCTION_CONCAT) if is_reduction else (NORMAL, quirks.normal_concat)
        stride = 2 if is_reduction else 1
        cell = Cell(genotype, concat, before, width, stride=stride, after_reduction=after_reduction, quirks=quirks)
        named.append((name, cell))
        before, after_reduction = (width * len(concat), before[0]), is_reduction
    named.append(("classifier", Classifier(before[0], classes, pool=size // 32)))
    return nn.Sequential(OrderedDict(named))


def _plan(layers: int) -> Iterator[tuple[str, bool]]:
    """Name of each cell, and whether it is a reduction: four reductions, normal cells after all but the first."""
    for group, normals in enumerate((0, layers // 3, layers // 3, layers // 3)):
        yield f"reduction{group}", True
        for k in range(normals):
            yield f"normal{group}_{k}", False
