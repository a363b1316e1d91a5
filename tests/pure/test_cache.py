"""A changed byte is never used."""

from __future__ import annotations

import os
import subprocess

import pytest

from gpipe_bench.util.cache import cache_folder, read_sealed, write_sealed
from tests.project.tree import ROOT

CONTENT = b"\x80\x05 123456789 \n\xff"


@pytest.fixture
def path(tmp_path):
    """A sealed file."""
    write_sealed(tmp_path / "value.pickle", CONTENT)
    return tmp_path / "value.pickle"


def test_what_was_written_comes_back(path, capsys):
    assert read_sealed(path) == CONTENT
    assert capsys.readouterr().err == ""


def test_what_is_not_there_is_nothing(path, tmp_path, capsys):
    assert read_sealed(tmp_path / "none.pickle") is None
    assert read_sealed(tmp_path) is None
    assert capsys.readouterr().err == ""


def test_every_changed_byte_is_found(path, capsys):
    whole = path.read_bytes()
    for place, byte in enumerate(whole):
        path.write_bytes(whole[:place] + bytes([byte ^ 1]) + whole[place + 1 :])
        assert read_sealed(path) is None
        assert f"note: {path} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b"\0" * len(b), lambda b: b"[" * 9999])
def test_a_file_cut_short_or_overwritten_is_found(path, damage, capsys):
    path.write_bytes(damage(path.read_bytes()))
    assert read_sealed(path) is None
    assert "is damaged" in capsys.readouterr().err


def test_a_home_that_cannot_be_written_gives_way_to_the_checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("native") == tmp_path / ".cache" / "gpipe_bench" / "native"
    # No folder, as root can write any: neither itself nor what would be below it can be made.
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path / "file" / "home"):
        monkeypatch.setenv("HOME", str(home))
        assert cache_folder("native") == ROOT / ".cache" / "gpipe_bench" / "native"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert cache_folder("native") == tmp_path / "own" / "gpipe_bench" / "native"


@pytest.mark.parametrize(("home", "cache"), [("home", ""), ("file", f"{ROOT}/.cache"), ("none/home", f"{ROOT}/.cache")])
def test_make_tells_its_programs_where_the_cache_is(tmp_path, home, cache):
    (tmp_path / "home").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "none").touch()
    (tmp_path / "Makefile").write_text(f'include {ROOT}/Makefile\ncheck-cache: ; @echo "<$$XDG_CACHE_HOME>"\n')
    given = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    command = ["make", "--silent", "--directory", str(ROOT), "--file", str(tmp_path / "Makefile"), "check-cache"]
    done = subprocess.run(
        command, env={**given, "HOME": str(tmp_path / home)}, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == f"<{cache}>\n"
