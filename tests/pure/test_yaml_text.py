"""YAML is data: what is no data, or too much of it, is refused in one line."""

from __future__ import annotations

import pytest

from gpipe_bench.util.yaml_text import read_yaml


def bomb(opening, closing, levels):
    """Text in which each line stands for nine of the line before."""
    lines = [f"a0: &a0 {opening}x: 1{closing}" if opening == "{" else "a0: &a0 [x]"]
    for level in range(levels):
        parts = ", ".join(f"k{n}: *a{level}" if opening == "{" else f"*a{level}" for n in range(9))
        lines.append(f"a{level + 1}: &a{level + 1} {opening}{parts}{closing}")
    return "\n".join(lines)


def test_plain_data():
    text = "a: &x [1, 1.5, true, null, 'yes', .inf]\nb: {c: *x}\nd: '2020-01-01'\n"
    listed = [1, 1.5, True, None, "yes", float("inf")]
    assert read_yaml(text) == {"a": listed, "b": {"c": listed}, "d": "2020-01-01"}
    assert read_yaml("") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\n? [a, b]\n: c\n", "line 2, column 3: key that is a list or a section must be text"),
        ("? {a: b}\n: c\n", "key that is a list or a section must be text"),
        ("2020-01-01: 1", "key 2020-01-01 must be text"),
        ("1.5: 1", "key 1.5 must be text"),
        ("{a: {null: 1}}", "key null must be text"),
        ("yes: 1", "key yes must be text"),
        ("<<: {a: 1}", "key << must be text"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: key 'a' stands twice"),
        ("a: 2020-02-30", "a value must be text, a number, true, false, a list or a section, got timestamp"),
        ("a: !!timestamp 'x'", "got timestamp"),
        ("a: !!set {b}", "got set"),
        ("a: !!python/object:os.system {}", "got python/object:os.system"),
        ("a: !!bool 'x'", "a value must be bool as it says, got x"),
        ("a: !!int '1.5'", "a value must be int as it says, got 1.5"),
        (f"a: {'9' * 5000}", "got 9999999999999999999999999999999999999999... of 5000 characters"),
        ("[" * 3000, "values are nested more than 20 deep"),
        ("{a: " * 3000, "values are nested more than 20 deep"),
        ("sweep: &s {simulated: {x: *s}}", "an alias stands inside the value that it refers to"),
        ("a: &a [*a]", "an alias stands inside the value that it refers to"),
        ("a: *b", "found undefined alias"),
        (bomb("[", "]", 6), "there are more than 20000 values, aliases included"),
        (bomb("{", "}", 6), "there are more than 20000 values, aliases included"),
        ("[" + "1, " * 20_001 + "]", "there are more than 20000 values"),
        ("a" * 1_000_001, "it has more than 1000000 characters"),
        ("a: [1", "expected ',' or ']'"),
        ("a: \x07", "special characters are not allowed"),
        ("a: 1\n---\nb: 2", "expected a single document"),
    ],
)
def test_what_is_refused(text, said):
    with pytest.raises(ValueError, match=r"\w") as caught:
        read_yaml(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250
