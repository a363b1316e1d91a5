"""Text of a user that no reader expects: one short line and exit status 2, whatever it would have been read as."""

from __future__ import annotations

import pytest

from gpipe_bench.cli import main

NINES, LONG, BRACKETS = "9" * 5000, "a" * 300, "[" * 3000
CELLS = ("simulate-cells", "--out", "{out}/s.json", "--cell")
CASES = {
    "digits of a cell": ((*CELLS, f"partitions={NINES}"), "partitions of --cell must be a whole number, got '999"),
    "cells without end": ((*CELLS, "chunks=1000000000"), "chunks of --cell must be at most 65536, got 1000000000"),
    "digits of a model": (("simulate", "--model-args", f"depth={NINES}"), "depth of unet must be an integer"),
    "layers without end": (("simulate", "--model-args", "B=10000000"), "B of unet must be at most 1000000"),
    "profile with a long name": (("simulate", "--profile", LONG), "--profile must be one of a100"),
    "memory without end": (("advise", "--memory-limit-gib", "inf"), "--memory-limit-gib must be a finite number"),
    "configuration with a long name": (("config", "check", LONG), "configuration must be a readable file, got aaa"),
    "configuration that does not end": (("config", "check", "/dev/zero"), "it has more than 1000000 characters"),
    "table with a long name": (
        ("datapackage", "take", LONG, "--folder", "{out}"),
        "table must be a readable CSV file, got aaa",
    ),
    "output with a long name": (
        ("simulate-published", "unet-speed", "--out", LONG),
        "output must be writable, got aaa",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_text_is_one_line(case, tmp_path, capsys):
    words, message = CASES[case]
    with pytest.raises(SystemExit) as caught:
        main([word.replace("{out}", str(tmp_path)) for word in words])
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert message in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert len(printed.err) < 1000
    assert list(tmp_path.iterdir()) == []
