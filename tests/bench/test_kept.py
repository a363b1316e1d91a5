"""Finished parts of a job outlive it, and are used by the same job alone."""

from __future__ import annotations

import pytest

from gpipe_bench.bench.storage.kept import KeptParts


@pytest.fixture
def result(tmp_path):
    """Where a result is to lie of which one part is finished."""
    path = tmp_path / "raw.json"
    KeptParts.beside(path, "key").add("first", {"rows": [1.5]})
    return path


def test_a_finished_part_is_there_again(result):
    kept = KeptParts.beside(result, "key")
    assert kept.get("first") == {"rows": [1.5]}
    assert kept.get("second") is None


def test_parts_gather(result):
    KeptParts.beside(result, "key").add("second", [])
    assert [KeptParts.beside(result, "key").get(name) for name in ("first", "second")] == [{"rows": [1.5]}, []]


def test_another_key_starts_anew(result):
    other = KeptParts.beside(result, "other")
    assert other.get("first") is None
    other.add("second", 2)
    assert KeptParts.beside(result, "key").get("first") is None
    assert KeptParts.beside(result, "other").get("second") == 2


@pytest.mark.parametrize("text", ["", "{", "[]\n", "3\n", '{"key": "key"}\n', '{"key": "key"}\n{"parts": 3}\n'])
def test_a_file_that_is_none_of_ours_is_nothing(result, text):
    (path,) = result.parent.iterdir()
    path.write_text(text)
    assert KeptParts.beside(result, "key").get("first") is None


def test_a_part_cut_short_is_left_out_and_the_next_one_kept(result):
    KeptParts.beside(result, "key").add("second", "long enough")
    (path,) = result.parent.iterdir()
    path.write_text(path.read_text()[:-6])
    KeptParts.beside(result, "key").add("third", 3)
    kept = KeptParts.beside(result, "key")
    assert [kept.get(name) for name in ("first", "second", "third")] == [{"rows": [1.5]}, None, 3]


def test_a_part_with_a_changed_digit_is_left_out(result):
    KeptParts.beside(result, "key").add("second", 2)
    (path,) = result.parent.iterdir()
    path.write_text(path.read_text().replace("1.5", "1.6"))
    kept = KeptParts.beside(result, "key")
    assert (kept.found, kept.get("first"), kept.get("second")) == (True, None, None)


def test_nothing_is_left_when_the_result_is_written(result):
    KeptParts.beside(result, "key").remove()
    KeptParts.beside(result, "key").remove()
    assert list(result.parent.iterdir()) == []
