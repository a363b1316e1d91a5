"""``python -m gpipe_bench`` and ``gpipe-bench``.

Nothing is imported at the top but what Python has loaded: an interrupt while the commands load is reported like any
other.
"""

from __future__ import annotations

import os
import signal
import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line of this process and exit; an interrupt is one word and exit status 130."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        _run()
    # Nothing is open yet, and inside an import an interrupt may turn into another exception.
    signal.signal(signal.SIGINT, _end)
    _load()
    seen: list[int] = []

    def interrupt(number: int, _: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        _run()
    except Exception:
        if not seen:
            raise
        _end()
    except KeyboardInterrupt:
        _end()


def _load() -> None:
    from gpipe_bench.cli import application

    # The modules of a command take most of the time.
    application(sys.argv[1:])


def _run() -> None:
    from gpipe_bench.cli import main as run

    run()


def _end(*_: object) -> None:
    """Say that the process was interrupted, and leave."""
    sys.stderr.flush()
    os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
