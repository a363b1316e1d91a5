"""Verdicts on engines: a line per behaviour, a column per engine; letters say what colours say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from gpipe_bench.figures.base import PAGE_IN, Figure, Panel, Rows, Selection, heading, legend
from gpipe_bench.figures.style import FAINT
from gpipe_bench.results.schema import TABLES
from gpipe_bench.results.tables import read_table

_LINE_IN: Final = 0.135
_LOOKS: Final[Mapping[str, tuple[str, str]]] = {
    "ok": ("#D9EFE6", ""),
    "limit": ("#EEEEEE", "·"),
    "wrong": ("#F6B48A", "w"),
    "raises": ("#F5E08A", "r"),
    "hangs": ("#D8B5D0", "h"),
}
"""Colour and letter of each verdict."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """A table of verdicts.

    Attributes:
        engines: with their versions, in the order of the table.
        behaviours: in the order of the table.
        kinds: the verdict by engine and behaviour.
        torch: versions of PyTorch.
    """

    engines: Mapping[str, str]
    behaviours: list[str]
    kinds: Mapping[tuple[str, str], str]
    torch: list[str]


def _read(path: Path, selection: Selection) -> Verdicts:
    del selection
    table = read_table(path, TABLES["judge"].columns, kind="judge")
    engines = dict(zip(table["engine"], table["version"].astype(str), strict=True))
    kinds = {(a, b): str(c) for a, b, c in zip(table["engine"], table["behaviour"], table["verdict"], strict=True)}
    return Verdicts(engines, [*dict.fromkeys(table["behaviour"])], kinds, sorted(set(table["torch"].astype(str))))


def _panels(found: Verdicts, width_in: float) -> Rows:
    bad = sum(kind not in ("ok", "limit") for kind in found.kinds.values())
    title = (
        f"{len(found.engines)} engines on {len(found.behaviours)} behaviours: "
        f"{bad} of {len(found.kinds)} verdicts are neither ok nor a limit"
    )
    setting = f"PyTorch {', '.join(found.torch)}; CPU, gloo between processes."
    handles = [Patch(facecolor=colour, label=f"{kind} {letter}") for kind, (colour, letter) in _LOOKS.items()]
    panel = Panel(_draw, found, (len(found.behaviours) + 9) * _LINE_IN)
    return [heading(title, ["measured"], setting, width_in), [panel], legend(handles, len(handles))]


def _draw(axes: Axes, data: Any) -> None:
    found: Verdicts = data
    names = [*found.engines]
    axes.set_xlim(0, len(names))
    axes.set_ylim(len(found.behaviours), 0)
    axes.set_yticks([k + 0.5 for k in range(len(found.behaviours))], found.behaviours)
    axes.set_xticks(
        [k + 0.5 for k in range(len(names))], [f"{name} {_short(found.engines[name])}" for name in names], rotation=90
    )
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    for x, name in enumerate(names):
        for y, behaviour in enumerate(found.behaviours):
            colour, letter = _LOOKS.get(found.kinds.get((name, behaviour), ""), ("white", ""))
            axes.add_patch(Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, facecolor=colour, linewidth=0))
            ink = FAINT if letter == "·" else "#000000"
            axes.text(x + 0.5, y + 0.5, letter, ha="center", va="center_baseline", color=ink)


def _short(version: str) -> str:
    return version.partition("+")[0]


VERDICTS: Final = Figure(
    name="verdicts",
    caption=(
        "The verdict of the judge on each behaviour of each engine. A limit is what the engine does not do, or not "
        "with checkpoints, as its authors or users say. Cases go from the smallest to the "
        "largest, and the first that is not ok decides."
    ),
    sources=("",),
    read=_read,
    panels=_panels,
    width_in=PAGE_IN,
)
