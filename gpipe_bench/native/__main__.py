"""``python -m gpipe_bench.native``: compile the C code of the package, unless the user's cache has it already."""

from __future__ import annotations

import sys

from gpipe_bench.errors import GpipeBenchError
from gpipe_bench.native.build import LIBRARIES, packaged


def main() -> int:
    """Compile and load every library; exit status 2 with an error on stderr when one cannot be."""
    try:
        for name in LIBRARIES:
            packaged(name)
    except GpipeBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
