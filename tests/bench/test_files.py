"""A file is whole or absent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpipe_bench.bench.storage.files import check_writable, json_text, staging, write_files
from gpipe_bench.errors import OutputError


def content(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_files_and_their_folders_are_made(tmp_path):
    write_files({tmp_path / "a" / "b.csv": "x\n", tmp_path / "c.json": "ä\r\n"})
    assert (tmp_path / "c.json").read_bytes() == "ä\r\n".encode()
    assert set(content(tmp_path)) == {"a/b.csv", "c.json"}


def test_when_one_cannot_be_written_none_is_replaced(tmp_path):
    (tmp_path / "first.csv").write_text("old")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"output must be writable, got .*second\.csv"):
        write_files({tmp_path / "first.csv": "new", tmp_path / "file" / "second.csv": "new"})
    assert content(tmp_path) == {"first.csv": "old", "file": ""}


def test_a_text_that_cannot_be_encoded_leaves_nothing(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_files({tmp_path / "a.csv": "fine", tmp_path / "b.csv": "\ud800"})
    assert content(tmp_path) == {}


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(OutputError, match="output must be a file, got the folder"):
        write_files({tmp_path / "a.csv": "x", tmp_path: "y"})
    assert content(tmp_path) == {}
    with pytest.raises(OutputError, match="output must be a file, got the folder"):
        check_writable(tmp_path)


def test_a_check_leaves_nothing_and_keeps_what_is_there(tmp_path):
    (tmp_path / "a.json").write_text("old")
    check_writable(tmp_path / "a.json")
    check_writable(tmp_path / "b" / "c.json")
    assert content(tmp_path) == {"a.json": "old"}


def test_a_check_finds_what_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another path"):
        check_writable(tmp_path / "file" / "a.json")


def test_others_may_read_what_the_umask_allows(tmp_path):
    before = os.umask(0o027)
    try:
        write_files({tmp_path / "a.csv": "x"})
    finally:
        os.umask(before)
    assert (tmp_path / "a.csv").stat().st_mode & 0o777 == 0o640


def test_a_staging_folder_goes_away_with_an_exception(tmp_path):
    with pytest.raises(IsADirectoryError), staging(tmp_path) as folder:
        folder.write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_json_has_no_nan():
    assert json_text({"a": [1.5, None]}).endswith("}\n")
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text({"a": float("nan")})


def test_what_a_killed_process_was_writing_is_removed_and_nothing_else(tmp_path):
    script = (
        "import os, sys; from pathlib import Path; from gpipe_bench.bench.storage import files\n"
        "with files.staging(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half.json').write_text('{')\n"
        "    files.tempfile.mkstemp(dir=sys.argv[1], prefix=files._prefix(Path(sys.argv[1])))\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 2
    elsewhere = tmp_path / ".writing-another-machine.1234567-abc"
    elsewhere.touch()
    with staging(tmp_path) as mine:
        write_files({tmp_path / "a.json": "new"})
        assert set(tmp_path.iterdir()) == {mine, elsewhere, tmp_path / "a.json"}
