"""A current folder for models of a user's own."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder, which Python forgets afterwards with all that was imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
