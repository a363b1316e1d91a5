"""What Python and C both name, read from the one table that C includes: ``table.h``."""

from __future__ import annotations

import ctypes
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

_TABLE: Final = (Path(__file__).parent / "table.h").read_text(encoding="utf-8")
_ROWS: Final = re.findall(r"^([A-Z]+)\((?:(\w+), )?(\w+)\)", _TABLE, re.MULTILINE)
# C types, and those of the module `array`.
_LETTERS: Final = {"int8_t": "b", "int32_t": "i", "int64_t": "q"}


def _names(group: str) -> tuple[str, ...]:
    return tuple(name for row, _, name in _ROWS if row == group)


STEPS: Final = {name: code for code, name in enumerate(_names("STEP"))}
ACTIONS: Final = {name: code for code, name in enumerate(_names("ACTION"))}
KINDS: Final = _names("KIND")


class Input(ctypes.Structure):
    """What is to run."""

    _fields_: ClassVar[Sequence[Any]] = [
        *((name, ctypes.c_int64) for name in _names("NUMBER")),
        *((name, ctypes.c_void_p) for name in _names("COLUMN")),
    ]


def filled(numbers: dict[str, int], columns: dict[str, Sequence[int]]) -> tuple[Input, list[array[int]]]:
    """The input of some numbers and columns, all of them, and the arrays that it points to.

    Raises:
        OverflowError: a number is too large for its column.
    """
    made = Input(**numbers)
    kept = []
    for letter, name in ((_LETTERS[of], name) for row, of, name in _ROWS if row == "COLUMN"):
        # An empty array has no address.
        values = columns[name] or (0,)
        held = values if isinstance(values, array) and values.typecode == letter else array(letter, values)
        kept.append(held)
        setattr(made, name, held.buffer_info()[0])
    return made, kept
