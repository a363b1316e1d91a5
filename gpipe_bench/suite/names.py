"""Names of files."""

from __future__ import annotations

import re

_MOST = 60


def readable(name: str) -> str:
    """A name in lower-case letters, digits and hyphens: ``timm/vit_b`` -> ``timm-vit-b``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def model_word(model: str) -> str:
    """A model in the name of a file; of a long path its end."""
    return readable(model)[-_MOST:].strip("-")
