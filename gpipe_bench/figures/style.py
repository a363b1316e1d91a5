"""What all figures share: fonts, colours, and files that are the same at every drawing.

No text is smaller than 7 points, and its contrast to what lies below it is 4.5 at least. Colours are those of Okabe
and Ito (https://jfly.uni-koeln.de/color/), told apart under the common colour deficiencies; those of text are darker.
Colour never stands alone, a marker or a hatch says the same. Text of an SVG file is text, which can be searched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import matplotlib.style
from matplotlib.figure import Figure

from gpipe_bench.errors import OutputError
from gpipe_bench.util.files import write_files

FONT_PT: Final = 7.0
TITLE_PT: Final = 8.0
SUFFIXES: Final = (".svg", ".pdf", ".png")

OKABE_ITO: Final = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "purple": "#CC79A7",
}
INK: Final = "#222222"
FAINT: Final = "#6B6B6B"
RULE: Final = "#DDDDDD"
EVIDENCE_COLOURS: Final = {
    "measured": "#007A59",
    "simulated": OKABE_ITO["blue"],
    "emulated": "#A8477D",
    "published": INK,
}
BADGE_COLOURS: Final = {**EVIDENCE_COLOURS, "computed": FAINT}
"""Colours of the badges: of the kinds of evidence, and of what arithmetic gives from values of one of these kinds."""

_RC: Final[dict[str, Any]] = {
    "axes.edgecolor": INK,
    "axes.formatter.limits": (-5, 7),
    "axes.formatter.useoffset": False,
    "axes.labelcolor": INK,
    "axes.labelpad": 2.0,
    "axes.labelsize": FONT_PT,
    "axes.linewidth": 0.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": TITLE_PT,
    "figure.dpi": 100,
    "font.family": "DejaVu Sans",
    "font.size": FONT_PT,
    "hatch.linewidth": 0.5,
    "legend.fontsize": FONT_PT,
    "legend.frameon": False,
    "lines.linewidth": 0.9,
    "pdf.fonttype": 42,
    "savefig.dpi": 300,
    "svg.fonttype": "none",
    "svg.hashsalt": "gpipe_bench",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "xtick.labelsize": FONT_PT,
    "xtick.major.pad": 2.0,
    "xtick.major.size": 2.0,
    "xtick.major.width": 0.5,
    "ytick.color": INK,
    "ytick.labelsize": FONT_PT,
    "ytick.major.pad": 2.0,
    "ytick.major.size": 2.0,
    "ytick.major.width": 0.5,
}

_DIGITS: Final = re.compile(rb"(\d\.\d\d)\d+")
_UNTURNED: Final = re.compile(rb' transform="rotate\(-0 [^)]*\)"')

# Without dates, versions and producers a file changes only when its picture does.
_METADATA: Final[dict[str, dict[str, Any]]] = {
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    ".png": {"Software": None},
}


@contextmanager
def drawing() -> Iterator[None]:
    """Style for everything drawn and saved inside, whatever the user's own matplotlibrc says."""
    with matplotlib.style.context(_RC, after_reset=True):
        yield


def save(figure: Figure, out_stem: Path, caption: str = "", title: str = "", badges: Sequence[str] = ()) -> list[Path]:
    """Write ``<out_stem>.svg``, ``.pdf`` and ``.png``: all three, or none; to be called inside :func:`drawing`.

    One of these suffixes at the end of ``out_stem`` is left out.

    The SVG file holds the title (without one its name), the caption, and the badges as keywords.

    Returns:
        The three paths, in that order.

    Raises:
        OutputError: a file could not be written.
    """
    if not out_stem.name:
        raise OutputError(f"figure must have a file name, got {str(out_stem)!r}; name a file without suffix in --out")
    out_stem = out_stem.with_suffix("") if out_stem.suffix in SUFFIXES else out_stem
    title = title or out_stem.name.replace("_", " ")
    words = {".svg": {"Title": title, "Description": caption or None, "Keywords": list(badges) or None}}
    pictures = {}
    for suffix in SUFFIXES:
        picture = BytesIO()
        figure.savefig(picture, format=suffix[1:], metadata={**_METADATA[suffix], **words.get(suffix, {})})
        content = _slim(picture.getvalue()) if suffix == ".svg" else picture.getvalue()
        pictures[out_stem.with_name(out_stem.name + suffix)] = content
    write_files(pictures)
    return list(pictures)


def _slim(svg: bytes) -> bytes:
    """Places to a hundredth of a point, of which matplotlib writes six digits; no turns by nothing; a second font."""
    placed = re.sub(rb'\b(?:d|x|y|transform)="[^"]*"', lambda found: _DIGITS.sub(rb"\1", found[0]), svg)
    placed = _UNTURNED.sub(b"", placed)
    return placed.replace(b"'DejaVu Sans'", b"'DejaVu Sans', Verdana, sans-serif")
