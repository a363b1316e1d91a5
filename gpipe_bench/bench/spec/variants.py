"""Sets of variants: which combinations of components an experiment runs, in words or label by label."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, WithJsonSchema

from gpipe_bench.bench.spec.settings import each_valid
from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.util.nearest import nearest

_SETS: Final = {
    "published": PUBLISHED,
    "factorial": tuple(components.label for components in Components.factorial()),
}
_SCHEMA: Final = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
}


def labels_of(variants: Iterable[str]) -> list[str]:
    """Labels of all variants, sets in their place, none twice."""
    return list(dict.fromkeys(label for name in variants for label in _SETS.get(name, (name,))))


def _variants(value: Any) -> Any:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not words:
        raise ValueError(f"must be a list of variants, got {value!r}; write published, factorial or labels")
    return tuple(each_valid(words, _canonical))


def _canonical(word: Any) -> str:
    if isinstance(word, str) and word in _SETS:
        return word
    try:
        return Components.from_label(str(word)).label
    except ValueError:
        hint = nearest(str(word), (*_SETS, *_SETS["factorial"]))
        raise ValueError(f"must be published, factorial or labels like dep-str-ptl, got {word!r}; {hint}") from None


Variants = Annotated[
    tuple[str, ...],
    BeforeValidator(_variants),
    WithJsonSchema(_SCHEMA),
    Field(description="published (4), factorial (32) or labels like dep-x-ptl-clk-x"),
]
