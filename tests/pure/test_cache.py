"""A changed byte is never used."""

from __future__ import annotations

import pytest

from gpipe_bench.util.cache import read_sealed, write_sealed

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
