"""What Python and C both name, read from the one table that C includes: ``table.h``."""

from __future__ import annotations

import ctypes
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

__all__ = ["ACTIONS", "KINDS", "RECORD_TYPES", "STEPS", "Input", "RecordColumns", "Result", "filled"]

_TABLE: Final = (Path(__file__).parent / "table.h").read_text(encoding="utf-8")
_ROWS: Final = re.findall(r"^([A-Z]+)\((?:(\w+), )?(\w+)\)", _TABLE, re.MULTILINE)
# C types, and those of the module `array`.
_LETTERS: Final = {"int8_t": "b", "int32_t": "i", "int64_t": "q"}


def _names(group: str) -> tuple[str, ...]:
    return tuple(name for row, _, name in _ROWS if row == group)


def _types(group: str) -> dict[str, str]:
    return {name: _LETTERS[of] for row, of, name in _ROWS if row == group}


STEPS: Final = {name: code for code, name in enumerate(_names("STEP"))}
ACTIONS: Final = {name: code for code, name in enumerate(_names("ACTION"))}
KINDS: Final = _names("KIND")
RECORD_TYPES: Final = _types("RECORD")
_COLUMN_TYPES: Final = _types("COLUMN")


class Input(ctypes.Structure):
    """What is to run."""

    _fields_: ClassVar[Sequence[Any]] = [
        (name, ctypes.c_int64 if row == "NUMBER" else ctypes.c_void_p)
        for row, _, name in _ROWS
        if row in {"NUMBER", "COLUMN"}
    ]


class Result(ctypes.Structure):
    """What came of it."""

    _fields_: ClassVar[Sequence[Any]] = [(name, ctypes.c_int64) for name in _names("RESULT")]


class RecordColumns(ctypes.Structure):
    """Where the columns of issued tasks go."""

    _fields_: ClassVar[Sequence[Any]] = [(name, ctypes.c_void_p) for name in RECORD_TYPES]


def filled(numbers: dict[str, int], columns: dict[str, Sequence[int]]) -> tuple[Input, list[array[int]]]:
    """The input of some numbers and columns, all of them, and the arrays that it points to.

    Raises:
        OverflowError: a number is too large for its column.
    """
    made = Input(**numbers)
    kept = []
    for name, letter in _COLUMN_TYPES.items():
        # An empty array has no address.
        values = columns[name] or (0,)
        held = values if isinstance(values, array) and values.typecode == letter else array(letter, values)
        kept.append(held)
        setattr(made, name, held.buffer_info()[0])
    return made, kept
