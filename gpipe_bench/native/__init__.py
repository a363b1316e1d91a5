"""The C code of the package: compiled once into the user's cache, then loaded with ctypes.

library(name, sources)     the library of some C files
packaged(name)             a library of this package, see :data:`gpipe_bench.native.build.LIBRARIES`

The libraries use no header of Python, so one file serves every version of Python. ``python -m gpipe_bench.native``
compiles all libraries of the package. No compiler is started for a library that is in the cache.
"""

from __future__ import annotations

from gpipe_bench.native.build import library, packaged

__all__ = ["library", "packaged"]
