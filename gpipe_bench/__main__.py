"""``python -m gpipe_bench`` and ``gpipe-bench``."""

from gpipe_bench.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
