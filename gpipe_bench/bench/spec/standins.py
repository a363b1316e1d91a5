"""Variants that stand in for one that a device cannot run."""

from __future__ import annotations

from dataclasses import replace

from gpipe_bench.components import Components

__all__ = ["without_copy_streams"]


def without_copy_streams(variant: str) -> str:
    """The label of the variant that differs from ``variant`` only by having no copy streams."""
    return replace(Components.from_label(variant), copy_streams=False).label
