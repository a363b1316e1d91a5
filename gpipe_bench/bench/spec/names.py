"""Names of files."""

from __future__ import annotations

import re

__all__ = ["readable"]


def readable(name: str) -> str:
    """A name in lower-case letters, digits and hyphens: ``timm/vit_b`` -> ``timm-vit-b``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
