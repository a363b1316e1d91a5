"""Text of a user that no reader expects: one short line and exit status 2, whatever it would have been read as."""

from __future__ import annotations

import pytest

from gpipe_bench.cli import main

NINES, LONG, BRACKETS = "9" * 5000, "a" * 300, "[" * 3000
RACE = ("peers", "run", "--out", "{out}/p.csv", "--set")
CASES = {
    "digits of a race": ((*RACE, f"seed={NINES}"), "--set seed must be a whole number, got '999"),
    "nesting of a race": ((*RACE, f"seed={BRACKETS}"), "--set seed must be a whole number, got '[[["),
    "infinity of a race": ((*RACE, "probe_s=Infinity"), "--set probe_s must be a finite number, got inf"),
    "digits of a model": (("simulate", "--model-args", f"depth={NINES}"), "depth of unet must be an integer"),
    "profile with a long name": (("simulate", "--profile", LONG), "--profile must be one of a100"),
    "memory without end": (("advise", "--memory-limit-gib", "inf"), "--memory-limit-gib must be a finite number"),
    "output with a long name": (("run", "--out", LONG), "output must be writable, got aaa"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_text_is_one_line(case, tmp_path, capsys):
    words, message = CASES[case]
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert message in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert len(printed.err) < 1000
    assert list(tmp_path.iterdir()) == []
