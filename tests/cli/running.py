"""Runs commands in this process."""

from __future__ import annotations

from typing import Any

import pytest

from gpipe_bench.cli import main


def called(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[Any, str, str]:
    """Exit status, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, words)))
    printed = capsys.readouterr()
    return caught.value.code or 0, printed.out, printed.err
