"""A cache of its own for each test, and the compiler that is in PATH."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder that libraries go to."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler, cc, in PATH")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache" / "gpipe_bench" / "native"
