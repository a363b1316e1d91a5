"""What the numbers of a hardware profile may be, so that a slip of units or names is found before it is simulated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from gpipe_bench.models.arguments import nearest

DIRECT_SHARE: Final = 1.0
"""Largest share of a peak: no device does more than its peak."""

FAST_SHARE: Final = 4.0
"""Largest share of convolutions that Winograd's algorithm may compute: of the direct algorithm's FLOPs, which are
counted, its usual tiles need a quarter."""

FASTEST: Final = 1e5
"""Largest rate in a profile, 10^17 FLOP or 10^14 bytes per second: what is faster was written in another unit."""

_ORDINARY: Final = ("bfloat16", "float16", "float32", "float64")
_MATRIX: Final = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "tensorfloat32")
_TYPES: Final = MappingProxyType({"peak_tflops": _ORDINARY, "matrix_tflops": _MATRIX})
_OTHER_NAMES: Final = MappingProxyType(
    {
        "half": "float16",
        "fp8": "float8_e4m3fn",
        "fp16": "float16",
        "bf16": "bfloat16",
        "single": "float32",
        "fp32": "float32",
        "tf32": "tensorfloat32",
        "double": "float64",
        "fp64": "float64",
    }
)
_SIZE_OR_FORM: Final = re.compile(r"\b\d+ ?gi?b\b|\b(sxm|hbm|gddr|pcie)\d*e?\b")


def rate_problems(table: str, rates: Mapping[str, float]) -> list[str]:
    """What is wrong with ``peak_tflops`` or ``matrix_tflops``."""
    problems = []
    if table == "peak_tflops" and "float32" not in rates:
        problems.append(f"peak_tflops must have float32, got {sorted(rates)}; add it")
    for dtype, value in rates.items():
        name = f"{table}.{dtype}"
        if dtype not in _TYPES[table]:
            problems.append(f"{name} must be the rate of a known type, got {dtype!r}; {_known_type(table, dtype)}")
        if value <= 0:
            problems.append(f"{name} must be positive, got {value:g}; leave it out if the device has no such units")
        if value > FASTEST:
            problems.append(_too_large(name, FASTEST, value, "write 10^12 FLOP per second"))
    return problems


def slip(path: Iterable[Any], limit: float, value: float) -> str:
    """The problem of a number above its limit; ``path``: of the setting."""
    parts = tuple(map(str, path))
    hint = "write a share, not percent" if parts[0] == "efficiency" else "write 10^9 bytes per second"
    return _too_large(".".join(parts), limit, value, hint)


def unknown_links(named: Mapping[str, Any], links: Mapping[str, Any]) -> list[str]:
    """The ways of a topology that name no link."""
    return [
        f"topology.{way} must name one of links, got {link!r}; "
        + (nearest(str(link), sorted(links)) if links else "links is empty, add it there")
        for way, link in named.items()
        if link not in links
    ]


def is_of_device(measured: str, device: str) -> bool:
    """Whether ``measured``, as the driver names a device, may be ``device``, as a profile names it.

    They differ in brand, form and memory; what counts are words such as A100 or 4090. Without one in ``device``, or
    with nothing in ``measured``, there is no telling.
    """
    models = {word for word in _words(device) if re.search(r"\d", word)}
    return not models or not measured or bool(models & _words(measured))


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", _SIZE_OR_FORM.sub(" ", name.lower())))


def _known_type(table: str, dtype: str) -> str:
    meant = _OTHER_NAMES.get(dtype.lower(), dtype)
    if meant in _MATRIX and meant not in _TYPES[table]:
        return f"move it to matrix_tflops, as {meant!r}"
    return nearest(meant, _TYPES[table]) if meant not in _TYPES[table] else f"use {meant!r}"


def _too_large(name: str, limit: float, value: float, hint: str) -> str:
    return f"{name} must be at most {limit:g}, got {value:g}; {hint}"
