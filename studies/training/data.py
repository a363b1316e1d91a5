"""Real images that scikit-learn ships: 1797 handwritten digits (8 x 8; UCI, Alpaydin and Kaynak 1998), two photographs.

    classification   a digit, scaled up to the size of the model
    segmentation     a digit, scaled up, drawn in a random shade over a crop of a photograph; the mask is its ink

Training and held-out images share no digit, and no part of a photograph: one takes the left half, one the right.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from gpipe_bench.models.table import parse_arguments
from studies.training.settings import Case


class Images(NamedTuple):
    """Training images in the order of training, and held-out ones.

    Attributes:
        name: what they are, for rows.
        train: (steps * batch size, 3, H, W) in [0, 1].
        train_target: classes (N,), or masks (N, 1, H, W).
        test: (held out, 3, H, W).
        test_target: as for training.
    """

    name: str
    train: Tensor
    train_target: Tensor
    test: Tensor
    test_target: Tensor


def load_images(case: Case) -> Images:
    """The images of a case; split, order, places and shades follow from its seed alone.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    ink = torch.from_numpy(np.asarray(digits.images, dtype=np.float32) / 16)[:, None]
    classes = torch.from_numpy(np.asarray(digits.target, dtype=np.int64))
    generator = torch.Generator().manual_seed(case.seed)
    order = torch.randperm(len(ink), generator=generator)
    count = max(case.steps, case.exact_steps) * case.batch_size
    test, train = order[: case.held_out], order[case.held_out :][:count]
    size = int(parse_arguments(case.model, case.model_args)["size"])
    if case.model == "unet":
        pairs = [_drawn(ink[part], size, half, generator) for half, part in enumerate((train, test))]
        return Images("digits over photographs (scikit-learn)", *pairs[0], *pairs[1])
    images = F.interpolate(ink, size=(size, size), mode="bilinear").expand(-1, 3, -1, -1)
    return Images("digits (scikit-learn)", images[train], classes[train], images[test], classes[test])


def _drawn(ink: Tensor, size: int, half: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Digits over crops of one half of the photographs: (N, 3, size, size), and their masks (N, 1, size, size)."""
    from sklearn.datasets import load_sample_images

    photos = [torch.from_numpy(np.array(photo)).permute(2, 0, 1) / 255 for photo in load_sample_images().images]
    small = size * 3 // 4
    images, masks = [], []
    for digit in F.interpolate(ink, size=(small, small), mode="bilinear"):
        which, top, left, row, column = torch.randint(2**31, (5,), generator=generator).tolist()
        photo = photos[which % len(photos)]
        middle = photo.shape[2] // 2
        y, x = top % (photo.shape[1] - size + 1), left % (middle - size + 1) + half * middle
        coverage = torch.zeros(1, size, size)
        j, k = row % (size - small + 1), column % (size - small + 1)
        coverage[:, j : j + small, k : k + small] = digit
        shade = torch.rand(3, 1, 1, generator=generator)
        images.append(photo[:, y : y + size, x : x + size] * (1 - coverage) + shade * coverage)
        masks.append((coverage > 0.5).float())
    return torch.stack(images), torch.stack(masks)
