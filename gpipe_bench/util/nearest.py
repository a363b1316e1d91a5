"""What to write instead of a name that nothing has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LOOK_ALIKE = str.maketrans("ol", "01")
"""A letter for a digit, as in ``p4O`` or ``a1OO``, is a slip of the finger."""
_MEANT = {"gpu": "cuda", "gpus": "cuda", "nvidia": "cuda", "gpt2-small": "gpt2"}
"""Words for a choice that are spelled like another one."""
_BEGINNING = 3
"""Letters of which a name may be the beginning of another one, as ``torch`` of ``torchvision``."""
_ALIKE = 0.65
"""Likeness of two names from which on one is offered for the other: ``resnet`` is no slip of ``unet``."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``use one of a, b`` or, if ``name`` looks like one of them, ``use 'a'``."""
    known = list(dict.fromkeys(known))
    if (meant := _MEANT.get(name.lower())) in known:
        return f"use {meant!r}"
    alike = {candidate.lower().translate(_LOOK_ALIKE): candidate for candidate in known}
    wanted = name.lower().translate(_LOOK_ALIKE)
    close = difflib.get_close_matches(wanted, alike, n=1, cutoff=_ALIKE)
    close = close or [candidate for candidate in alike if len(wanted) >= _BEGINNING and candidate.startswith(wanted)]
    return f"use {alike[close[0]]!r}" if close else f"use one of {', '.join(known)}"


def nearest_few(name: str, known: Iterable[str]) -> str:
    """``use 'a', 'b' or 'c'``: those of many names that are the most like ``name``."""
    close = [repr(one) for one in difflib.get_close_matches(name, dict.fromkeys(known), n=3, cutoff=0)]
    return f"use {' or '.join(filter(None, [', '.join(close[:-1]), close[-1]]))}"
