"""The models of the suite, each a plain ``nn.Sequential``, and networks of torchvision and timm as such.

Importing this package loads no PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_bench.util.lazy import lazy

if TYPE_CHECKING:
    from gpipe_bench.models.chain import from_original, to_original
    from gpipe_bench.models.table import MODELS
    from gpipe_bench.models.vision import cut_network, original

__all__ = ["MODELS", "cut_network", "from_original", "original", "to_original"]

_LAZY = {
    "MODELS": "gpipe_bench.models.table",
    "cut_network": "gpipe_bench.models.vision",
    "from_original": "gpipe_bench.models.chain",
    "original": "gpipe_bench.models.vision",
    "to_original": "gpipe_bench.models.chain",
}

__getattr__, __dir__ = lazy(__name__, _LAZY, __all__)
