"""ResNet-101 as a flat ``nn.Sequential``, in the form in which torchgpipe benchmarked it: 370 layers.

    image ─ stem ─ (stash ─ conv ─ norm ─ relu ─ conv ─ norm ─ relu ─ conv ─ norm ─ pop, add ─ relu) x 33 ─ classifier

He et al. (arXiv 1512.03385), with the stride of a bottleneck in its 3x3 convolution, as torchvision has it. The
shortcut of a block is a skip, so a balance can cut anywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator

from torch import Tensor, nn

from gpipe_bench.skip import Namespace, Skippable, pop, skippable, stash

NamedLayer = tuple[str, nn.Module]

_EXPANSION = 4


@skippable(stash=["shortcut"])
class Stash(nn.Module, Skippable):
    """Passes its input on and stashes it as ``shortcut``."""

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        """Give ``x`` of shape (N, C, H, W) unchanged."""
        yield stash("shortcut", x)
        return x


@skippable(pop=["shortcut"])
class PopAdd(nn.Module, Skippable):
    """Pops ``shortcut``, brings it to the shape of the input, and adds it.

    Args:
        projection: what brings it there; None where it has that shape already.
    """

    def __init__(self, projection: nn.Module | None) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        """Give the sum, of the shape of ``x``, (N, C, H, W)."""
        shortcut = yield pop("shortcut")
        return x + (shortcut if self.projection is None else self.projection(shortcut))


def resnet101(classes: int = 1000) -> nn.Sequential:
    """ResNet-101: input (N, 3, H, W), output (N, classes); 370 layers.

    Args:
        classes: number of classes.
    """
    layers: list[NamedLayer] = [
        ("conv", nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)),
        ("norm", nn.BatchNorm2d(64)),
        ("relu", nn.ReLU()),
        ("pool", nn.MaxPool2d(3, stride=2, padding=1)),
    ]
    before = 64
    for group, blocks in enumerate((3, 4, 23, 3)):
        width = 64 * 2**group
        for b in range(blocks):
            stride = 2 if group and b == 0 else 1
            layers += _bottleneck(f"group{group}_block{b}", before, width, stride)
            before = width * _EXPANSION
    layers += [("average", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten())]
    layers.append(("classifier", nn.Linear(before, classes)))
    return nn.Sequential(OrderedDict(layers))


def _bottleneck(name: str, before: int, width: int, stride: int) -> Iterator[NamedLayer]:
    after = width * _EXPANSION
    namespace = Namespace()
    projection = None
    if stride > 1 or before != after:
        projection = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))
    yield f"{name}_stash", Stash().isolate(namespace)
    yield f"{name}_conv0", nn.Conv2d(before, width, 1, bias=False)
    yield f"{name}_norm0", nn.BatchNorm2d(width)
    yield f"{name}_relu0", nn.ReLU()
    yield f"{name}_conv1", nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
    yield f"{name}_norm1", nn.BatchNorm2d(width)
    yield f"{name}_relu1", nn.ReLU()
    yield f"{name}_conv2", nn.Conv2d(width, after, 1, bias=False)
    yield f"{name}_norm2", nn.BatchNorm2d(after)
    yield f"{name}_pop", PopAdd(projection).isolate(namespace)
    yield f"{name}_relu", nn.ReLU()
