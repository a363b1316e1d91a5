"""YAML is data: what is no data is refused in one line."""

from __future__ import annotations

import pytest

from gpipe_bench.util.yaml_text import read_yaml


def test_plain_data():
    text = "a: &x [1, 1.5, true, null, 'yes', .inf]\nb: {c: *x}\nd: '2020-01-01'\n"
    listed = [1, 1.5, True, None, "yes", float("inf")]
    assert read_yaml(text) == {"a": listed, "b": {"c": listed}, "d": "2020-01-01"}
    assert read_yaml("") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\n? [a, b]\n: c\n", "line 2, column 3: key that is a list or a section must be text"),
        ("2020-01-01: 1", "key 2020-01-01 must be text"),
        ("yes: 1", "key yes must be text"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: key 'a' stands twice"),
        ("a: 2020-02-30", "day is out of range"),
        ("a: !!python/object:os.system {}", "could not determine a constructor for the tag"),
        (f"a: {'9' * 5000}", "Exceeds the limit"),
        ("[" * 3000, "recursion"),
        ("a: [1", "expected ',' or ']'"),
    ],
)
def test_what_is_refused(text, said):
    with pytest.raises(ValueError, match=r"\w") as caught:
        read_yaml(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
