"""Finished parts of a job outlive it, and are used by the same job alone."""

from __future__ import annotations

import pytest

from gpipe_bench.bench.kept import KeptParts


@pytest.fixture
def result(tmp_path):
    """Where a result is to lie of which one part is finished."""
    path = tmp_path / "raw.json"
    KeptParts(path, "key").add("first", {"rows": [1.5]})
    return path


def test_a_finished_part_is_there_again(result):
    kept = KeptParts(result, "key")
    assert kept.get("first") == {"rows": [1.5]}
    assert kept.get("second") is None


def test_parts_gather(result):
    KeptParts(result, "key").add("second", [])
    assert [KeptParts(result, "key").get(name) for name in ("first", "second")] == [{"rows": [1.5]}, []]


def test_another_key_starts_anew(result):
    other = KeptParts(result, "other")
    assert other.get("first") is None
    other.add("second", 2)
    assert KeptParts(result, "key").get("first") is None
    assert KeptParts(result, "other").get("second") == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"key": "key"}', '{"key": "key", "parts": 3}'])
def test_a_file_that_is_none_of_ours_is_nothing(result, text):
    (path,) = result.parent.iterdir()
    path.write_text(text)
    assert KeptParts(result, "key").get("first") is None


def test_nothing_is_left_when_the_result_is_written(result):
    KeptParts(result, "key").remove()
    KeptParts(result, "key").remove()
    assert list(result.parent.iterdir()) == []
