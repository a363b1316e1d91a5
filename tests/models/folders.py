"""Modules of a user's, written where a test wants them."""

from __future__ import annotations

from textwrap import dedent


def write(place, text):
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(dedent(text))
