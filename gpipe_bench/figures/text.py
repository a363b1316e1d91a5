"""Text that fits: widths from the font itself, lines broken where they must be, numbers of three digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from gpipe_bench.figures.style import FONT_PT

TIMES = "\N{MULTIPLICATION SIGN}"


@lru_cache(maxsize=4096)
def text_width_pt(text: str, size_pt: float = FONT_PT, *, bold: bool = False) -> float:
    """Width of one line of text in points."""
    font = FontProperties(family="DejaVu Sans", size=size_pt, weight="bold" if bold else "normal")
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def wrap(text: str, width_pt: float, size_pt: float = FONT_PT, *, bold: bool = False) -> list[str]:
    """Break ``text`` at spaces into lines of at most ``width_pt`` points; a longer word is broken inside."""
    lines: list[str] = []
    # Not split(): a no-break space keeps a number with its unit.
    for word in filter(None, text.split(" ")):
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and text_width_pt(joined, size_pt, bold=bold) <= width_pt:
            lines[-1] = joined
        else:
            lines += _pieces(word, width_pt, size_pt, bold=bold)
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


def listing(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
