"""A file is whole or absent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from gpipe_bench.errors import OutputError
from gpipe_bench.util.files import check_writable, is_file, is_folder, json_text, staging, write_files


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
        "import os, sys; from pathlib import Path; from gpipe_bench.util import files\n"
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


def test_an_old_draft_of_another_machine_is_removed(tmp_path):
    old = tmp_path / ".writing-another-machine.1234567-abc"
    old.touch()
    os.utime(old, (0, time.time() - 2 * 24 * 3600))
    write_files({tmp_path / "a.json": "new"})
    assert content(tmp_path) == {"a.json": "new"}


def test_what_is_no_draft_stays(tmp_path):
    (tmp_path / ".writing").touch()
    (tmp_path / "a.writing-1").touch()
    write_files({tmp_path / "a.json": b"new"})
    assert set(content(tmp_path)) == {".writing", "a.writing-1", "a.json"}


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(self, mode):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tmp_path), "chmod", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_files({tmp_path / "a.json": "new"})
    assert list(tmp_path.iterdir()) == []


def write_one_letter(path, letter):
    """Write one long file many times; returns the texts other than such a file that were read in between."""
    strange = []
    for _ in range(100):
        write_files({path: letter * 200_000})
        text = path.read_text()
        if len(text) != 200_000 or len(set(text)) != 1:
            strange.append(text[:20])
    return strange


def test_two_writers_of_one_file_do_not_mix(tmp_path):
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        both = [pool.submit(write_one_letter, tmp_path / "a.csv", letter) for letter in "AB"]
        assert [one.result() for one in both] == [[], []]
    assert set(content(tmp_path)) == {"a.csv"}


def test_a_link_in_the_place_of_a_file_is_replaced_not_followed(tmp_path):
    (tmp_path / "kept.txt").write_text("old")
    (tmp_path / "a.csv").symlink_to(tmp_path / "kept.txt")
    write_files({tmp_path / "a.csv": "new"})
    assert content(tmp_path) == {"kept.txt": "old", "a.csv": "new"}


@pytest.mark.parametrize("write", [check_writable, lambda path: write_files({path: "x"})])
def test_a_name_that_is_too_long_is_refused(tmp_path, write):
    with pytest.raises(OutputError, match=r"output must be writable.*File name too long"):
        write(tmp_path / ("a" * 300))


def test_a_name_that_no_file_can_have_is_none(tmp_path):
    (tmp_path / "a").touch()
    assert (is_file(tmp_path / "a"), is_folder(tmp_path)) == (True, True)
    assert (is_file(tmp_path), is_folder(tmp_path / "a")) == (False, False)
    assert (is_file(tmp_path / ("a" * 300)), is_folder(tmp_path / ("a" * 300))) == (False, False)
