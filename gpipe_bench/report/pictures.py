"""Figures as parts of the page: searchable, small, and with colours for light and for dark."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from markupsafe import Markup

from gpipe_bench.report.sources import Source
from gpipe_bench.results.catalogue import DrawnFigure
from gpipe_bench.results.rows import EVIDENCE

_ON_DARK: Final = {
    "#222222": "#e4e4e4",
    "#6b6b6b": "#a2a2a2",
    "#dddddd": "#3d3d3d",
    "#ffffff": "#171717",
    "#000000": "#ffffff",
    **dict.fromkeys(("#eeeeee", "#e6e6e6", "#e8e8e8", "#f6f6f6", "#f4f4f4"), "#2c2c2c"),
}
"""Text, lines and grounds of a figure, and what they are on a dark page."""

_MARK, _TEXT = 0.13, 0.22
"""From these luminances on, a mark has a contrast of 3 to the dark page, and text one of 4.5."""


@dataclass(frozen=True, slots=True)
class PageFigure:
    """A figure inside the page.

    Attributes:
        id: anchor of the page.
        title: what the figure shows, as a sentence; of a figure without one its name.
        badges: the kinds of evidence that it draws.
        hardware: what it is of.
        image: the picture.
        caption: how it is read.
        table: the file that it is drawn from; empty if unknown.
    """

    id: str
    title: str
    badges: list[str]
    hardware: str
    image: Markup
    caption: str
    table: str


def page_figure(path: Path, source: Source, drawn: DrawnFigure | None, styles: dict[str, str]) -> PageFigure:
    """An SVG file as a part of the page.

    Args:
        path: the file.
        source: where it lies.
        drawn: which figure of which table it is, if that is known.
        styles: the class of each style, which grows; thousands of elements share a few styles.
    """
    picture = path.read_text(encoding="utf-8")
    caption = re.search(r"<dc:description>(.*?)</dc:description>", picture, flags=re.DOTALL)
    title = re.search(r"<dc:title>(.*?)</dc:title>", picture, flags=re.DOTALL)
    badges = re.findall(r"<rdf:li>(.*?)</rdf:li>", picture)
    name = (drawn.name if drawn else path.stem).replace("_", " ")
    evidence = drawn.evidence if drawn else source.evidence or _evidence_in(path.stem)
    return PageFigure(
        id="-".join(filter(None, ("figure", source.place, path.stem))),
        title=html.unescape(title[1]) if title else name,
        badges=badges or [evidence] * bool(evidence),
        hardware=source.hardware,
        image=Markup(_slim(picture, styles)),  # noqa: S704 - a figure of this project
        caption=html.unescape(caption[1]) if caption else "",
        table=str(drawn.table) if drawn else "",
    )


def themed(style: str) -> str:
    """A style with a second value of each colour that a dark page needs otherwise.

    White text stays, since it stands on dark areas. So do areas without an edge: cells of maps, on which numbers stand.
    """
    text, edged = "font-size" in style, "stroke: #" in style
    found = [style]
    for name, colour in re.findall(r"(fill|stroke): (#[0-9a-f]{6})", style):
        if text and colour == "#ffffff":
            continue
        dark = _ON_DARK.get(
            colour, _lighter(colour, _TEXT if text else _MARK) if text or name == "stroke" or edged else colour
        )
        if dark != colour:
            found.append(f"{name}: light-dark({colour}, {dark})")
    return "; ".join(found)


def _slim(picture: str, styles: dict[str, str]) -> str:
    # As a part of the page, so that its text can be searched: without the prologue of a file, names of groups, which
    # other figures have, too, and the font, which the page says once.
    picture = re.sub(r"<metadata>.*?</metadata>", "", picture[picture.index("<svg") :], flags=re.DOTALL)
    picture = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", re.sub(r"\s*\n\s*", " ", picture)).replace("> <", "><")
    picture = picture.replace("font-family: 'DejaVu Sans', Verdana, sans-serif; ", "")
    # Lines of a hatch stand on a colour, which is that of a light page.
    picture = re.sub(r"<pattern.*?</pattern>", lambda found: found[0].replace("#222222", "#232323"), picture)
    # Paths are half of the page: no spaces around their letters, and no zeros at the ends of their numbers.
    picture = re.sub(
        r' d="[^"]*"',
        lambda path: re.sub(r"(?<=\.\d)0(?!\d)|(?<=[\dz]) (?=[MLCQz])|(?<=[MLCQ]) ", "", path[0]),
        picture,
    )
    # A few styles are those of thousands of elements, so the page says each once, as a class.
    return re.sub(
        r' style="([^"]*)"', lambda style: f' class="{styles.setdefault(style[1], f"s{len(styles)}")}"', picture
    )


def _lighter(colour: str, luminance: float) -> str:
    """A colour with as much white as a dark page asks for."""
    parts = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    for tenths in range(11):
        mixed = [round(part + (255 - part) * tenths / 10) for part in parts]
        linear = [(part / 255) ** 2.2 for part in mixed]
        if sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) >= luminance:
            return "#" + "".join(f"{part:02x}" for part in mixed)
    return "#ffffff"


def _evidence_in(name: str) -> str:
    """The evidence that a name of a file ends with; studies name the figures of a run like that, too."""
    end = name.rpartition("_")[2]
    return end if end in EVIDENCE else ""
