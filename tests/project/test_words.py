"""One word per idea, no unfinished business, and nothing that holds on one machine only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.project.tree import ROOT, texts

HERE = str(Path(__file__).relative_to(ROOT))
KINDS = (".py", ".c", ".h", ".smk", ".md", ".sh", ".toml", ".yaml", ".yml", ".rst", ".cff")
NAMES = ("Snakefile", "Makefile", "run")
TEXT = [(name, text) for name, text in texts(*KINDS, *NAMES) if name != HERE]

# Pattern -> what to write instead.
WORDS = {
    r"\bsub-?batch": "micro-batch",
    r"\bn_microbatches\b": "chunks asked for, microbatches as they came out",
    r"\bsplit sizes\b": "balance",
    r"\bremat\b": "recompute",
    r"\b(mock|fake)(ed)?\b": "published, simulated or measured",
    r"\b(TODO|FIXME|XXX|HACK)\b": "the finished thing",
    r"\bissue #?\d+\b": "the reason itself; threads of other projects as project#number",
    r"raise NotImplementedError": "an abstract method, or one of the errors in gpipe_bench.errors",
    # Absolute paths of somebody's machine.
    r"(?<![\w.}])/(home|root|Users|work|opt|mnt)/": "a path below the repository, or an argument",
    r"\bpypi\.org|pythonhosted|--(extra-)?index-url": "nothing: pip's own configuration says where packages are",
}


@pytest.mark.parametrize("pattern", WORDS)
def test_words_that_do_not_belong(pattern):
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in TEXT
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == [], f"write: {WORDS[pattern]}"


def test_no_path_leaves_the_repository():
    outside = [
        f"{name}: {path}"
        for name, text in TEXT
        for path in re.findall(r"(?:\.\./)+[\w./-]*", text)
        if not (ROOT / name).parent.joinpath(path).resolve().is_relative_to(ROOT)
    ]
    assert outside == []


def test_the_patterns_find_what_they_are_for():
    lines = ["the n_microbatches", "see issue 12", "# TODO later", "cd /home/me/x", "a fake number", "remat"]
    assert all(any(re.search(pattern, line) for pattern in WORDS) for line in lines)
    assert not any(re.search(pattern, "pytorch#135633 in $HOME/x, microbatches") for pattern in WORDS)
