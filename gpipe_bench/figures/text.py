"""Text that fits: widths from the font itself, lines broken where they must be, numbers of three digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from gpipe_bench.figures.style import FONT_PT

TIMES = "\N{MULTIPLICATION SIGN}"


@lru_cache(maxsize=4096)
def text_width_pt(text: str, size_pt: float = FONT_PT, *, bold: bool = False) -> float:
    """Width of one line of text in points."""
    font = FontProperties(family="DejaVu Sans", size=size_pt, weight="bold" if bold else "normal")
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def wrap(
    text: str, width_pt: float, size_pt: float = FONT_PT, *, bold: bool = False, first_pt: float | None = None
) -> list[str]:
    """Break ``text`` at spaces into lines of at most ``width_pt`` points; a longer word is broken inside.

    Args:
        text: without line breaks.
        width_pt: of a line.
        size_pt: of the font.
        bold: whether the font is bold.
        first_pt: width of the first line, if something stands at its right.
    """
    lines: list[str] = []
    # Not split(): a no-break space keeps a number with its unit.
    for word in filter(None, text.split(" ")):
        room = width_pt if first_pt is None or len(lines) > 1 else first_pt
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and text_width_pt(joined, size_pt, bold=bold) <= room:
            lines[-1] = joined
        else:
            lines += _pieces(word, width_pt if lines else room, size_pt, bold=bold)
    return lines


def _pieces(word: str, width_pt: float, size_pt: float, *, bold: bool) -> list[str]:
    pieces = [""]
    for letter in word:
        if pieces[-1] and text_width_pt(pieces[-1] + letter, size_pt, bold=bold) > width_pt:
            pieces.append("")
        pieces[-1] += letter
    return pieces


def significant(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits and no exponent: 1234, 58.5, 0.0312."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, decimals):.{max(decimals, 0)}f}"


def percent(share: float) -> str:
    """A share of 1 in whole percent, small ones with a digit more: ``46 %``, ``0.3 %``."""
    digits = 1 if 0 < abs(share) < 0.0095 else 0
    return f"{100 * share:.{digits}f}\u00a0%".replace("-", "\N{MINUS SIGN}")


def times(ratio: float) -> str:
    """A ratio with two decimals and the sign of a product."""
    return f"{ratio:.2f}{TIMES}"


NAIVE: Final = "m = 1 is naive model parallelism: one device works at a time."
"""What a figure says where one of its cells has a single micro-batch on several devices."""


def listing(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
