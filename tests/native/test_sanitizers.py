"""What the check with sanitizers would find: each planted error ends the process with a report of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts import check_native

SOURCE = """\
#include <stdint.h>
#include <stdlib.h>
int64_t past_the_heap(int64_t n);
int64_t used_after_free(int64_t n);
int64_t past_the_buffer(int64_t n, const int64_t *buffer);
int64_t overflow(int64_t n);
int64_t right(int64_t n);

static int64_t *volatile row; /* volatile: the compiler must not see the error, or it would refuse it */
static void make(int64_t n) { row = calloc((size_t)n, sizeof(int64_t)); }
int64_t past_the_heap(int64_t n) { make(n); int64_t x = row[n]; free(row); return x; }
int64_t used_after_free(int64_t n) { make(n); free(row); return row[0]; }
int64_t past_the_buffer(int64_t n, const int64_t *buffer) { return buffer[n]; }
int64_t overflow(int64_t n) { return INT64_MAX - 4 + n; }
int64_t right(int64_t n) { return n; }
"""
PROGRAM = """\
import ctypes, sys
from array import array
from pathlib import Path
from gpipe_bench.native import library
function = library("planted", [Path(sys.argv[1])])[sys.argv[2]]
function.argtypes, function.restype = [ctypes.c_int64, ctypes.c_void_p], ctypes.c_int64
buffer = array("q", [0] * 5)  # from a list: one that grew has room behind its end, which no sanitizer knows of
function(5, buffer.buffer_info()[0])
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The source, and the environment of a Python that loads it with the sanitizers."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.c").write_text(SOURCE)
    given = check_native.environment(folder / "cache")
    if given is None:
        pytest.skip("needs a compiler with the sanitizers as shared libraries, such as gcc on Linux")
    return folder / "planted.c", given


@pytest.mark.parametrize(
    ("name", "report"),
    [
        ("past_the_heap", "AddressSanitizer: heap-buffer-overflow"),
        ("past_the_buffer", "AddressSanitizer: heap-buffer-overflow"),
        ("used_after_free", "AddressSanitizer: heap-use-after-free"),
        ("overflow", "runtime error: signed integer overflow"),
        ("right", ""),
    ],
)
def test_a_planted_error_is_reported(name, report, planted):
    source, given = planted
    command = [sys.executable, "-c", PROGRAM, source, name]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert (report in done.stderr, done.returncode == 0) == (True, report == ""), done.stderr


def test_the_check_fails_and_shows_the_report_and_the_test(planted, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(check_native, "COMPILE", "")  # the planted library alone is needed
    lines = PROGRAM.replace("sys.argv[1]", repr(str(planted[0]))).replace("sys.argv[2]", "'overflow'")
    body = "".join(f"    {line}\n" for line in lines.splitlines())
    (tmp_path / "test_planted.py").write_text(f"def test_planted():\n{body}")
    assert check_native.main([str(tmp_path)]) != 0
    printed = capfd.readouterr().err
    assert "planted.c:14:52: runtime error: signed integer overflow" in printed
    assert "in test_planted" in printed
