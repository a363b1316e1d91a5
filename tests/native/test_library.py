"""C files are compiled once per content, flags and compiler; what goes wrong is one clear error."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys

import pytest

from gpipe_bench.errors import CompilerError, OutputError
from gpipe_bench.native import __main__ as command
from gpipe_bench.native import build, compiler, library

HEADER = """\
#ifndef NUMBER
#define NUMBER 1
#endif
"""
SOURCE = """\
#include <math.h>
#include <stdint.h>
#include "number.h"
int64_t number(void);
int64_t number(void) { return (int64_t)sqrt(NUMBER * NUMBER); }
"""
# In a process of its own: the number, and modules that a library must do without.
PROGRAM = """\
import sys
from pathlib import Path
from gpipe_bench.native import library
number = library("tiny", [Path(sys.argv[1])]).number()
print(number, *sorted({"json", "numpy", "subprocess", "tempfile", "torch"}.intersection(sys.modules)))
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "number.h").write_text(HEADER)
    path = tmp_path / "code" / "number.c"
    path.write_text(SOURCE)
    return path


def number(*sources):
    return library("tiny", sources).number()


def without_wheel(monkeypatch, spec=None):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(compiler, "find_spec", lambda name: spec)


def test_a_library_is_compiled_once(source, cache, monkeypatch):
    assert number(source) == 1
    monkeypatch.setattr(subprocess, "run", None)
    assert number(source) == 1
    (file,) = cache.iterdir()
    assert file.match("tiny-*.so")


def test_an_edit_of_a_source_or_a_header_is_compiled(source):
    assert number(source) == 1
    header = source.with_name("number.h")
    header.write_text(header.read_text().replace("NUMBER 1", "NUMBER 2"))
    assert number(source) == 2
    source.write_text(source.read_text().replace("sqrt(", "1 + sqrt("))
    assert number(source) == 3


@pytest.mark.parametrize("name", ["values.def", "values"])
def test_any_included_file_counts(source, name):
    source.with_name(name).write_text("11")
    source.write_text(f'int number(void);\nint number(void) {{ return\n#include "{name}"\n; }}\n')
    assert number(source) == 11
    source.with_name(name).write_text("12")
    assert number(source) == 12


def test_a_source_more_is_compiled(source):
    assert number(source) == 1
    second = source.with_name("second.c")
    second.write_text("int second(void);\nint second(void) { return 2; }\n")
    assert library("tiny", [source, second]).second() == 2


def test_other_flags_are_compiled(source, monkeypatch):
    assert number(source) == 1
    monkeypatch.setenv(build.EXTRA_FLAGS, "-DNUMBER='4 + 3'")
    assert number(source) == 4  # the root of 4 + 3 * 4 + 3


def test_the_compiler_may_have_options(source, monkeypatch):
    assert number(source) == 1
    monkeypatch.setenv("CC", "cc -DNUMBER=5")
    assert number(source) == 5


def test_another_compiler_compiles_again(source, cache, tmp_path, monkeypatch):
    number(source)
    script = tmp_path / "my cc"
    script.write_text(f'#!/bin/sh\nexec {shutil.which("cc")} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", f"'{script}'")
    number(source)
    assert len(list(cache.iterdir())) == 2


def test_a_compiler_that_cannot_see_all_files_at_once_compiles_them_one_by_one(source, tmp_path, monkeypatch):
    script = tmp_path / "plain-cc"
    script.write_text(f'#!/bin/sh\ncase "$*" in *-flto*) exit 1;; esac\nexec {shutil.which("cc")} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", f"'{script}'")
    assert number(source) == 1


def test_processes_that_compile_at_once_do_not_mix(source, cache):
    started = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(source)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [child.communicate()[0].split()[0] for child in started] == ["1", "1"]
    assert len(list(cache.iterdir())) == 1


def test_a_library_in_the_cache_loads_no_other_modules(source):
    number(source)
    done = subprocess.run([sys.executable, "-c", PROGRAM, source], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_the_wheel_of_a_compiler_is_used_where_there_is_no_other(source, tmp_path, monkeypatch):
    zig = tmp_path / "zig"
    zig.write_text(f'#!/bin/sh\n[ "$1 $2" = "cc -mcpu=baseline" ] && shift 2 && exec {shutil.which("cc")} "$@"\n')
    zig.chmod(0o755)
    path = os.environ["PATH"]
    without_wheel(monkeypatch, importlib.machinery.ModuleSpec("ziglang", None, origin=str(tmp_path / "__init__.py")))
    assert compiler.find_compiler() == [str(zig), "cc", "-mcpu=baseline"]
    monkeypatch.setattr(compiler.shutil, "which", lambda program: None)
    monkeypatch.setenv("PATH", path)  # the linker is looked for there
    assert number(source) == 1


def test_no_compiler_is_one_line_that_says_what_to_install(source, monkeypatch):
    without_wheel(monkeypatch)
    with pytest.raises(CompilerError, match=r"^a C compiler must be .*; install gcc or clang, or run: .* ziglang$"):
        number(source)


def test_a_library_outlives_its_compiler(source, monkeypatch):
    number(source)
    without_wheel(monkeypatch)
    assert number(source) == 1


def test_code_that_does_not_compile_is_shown_with_the_first_lines_of_what_the_compiler_says(source, cache):
    source.write_text("int wrong(void) { return undeclared; }\n" * 30)
    said = r"C code must compile with .*, got exit status 1; name another compiler in CC\n(.*\n)+.*undeclared"
    with pytest.raises(CompilerError, match=said) as caught:
        number(source)
    assert str(caught.value).count("\n") <= 12
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("named", "error"),
    [
        ("no-such-compiler -O3", "CC must name a program in PATH, got no-such-compiler; correct or unset CC"),
        ("'cc", 'CC must be words of a shell, got "\'cc" '),
    ],
)
def test_a_wrong_name_of_a_compiler(source, named, error, monkeypatch):
    monkeypatch.setenv("CC", named)
    with pytest.raises(CompilerError, match=error):
        number(source)


def test_a_cache_that_cannot_be_written(source, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OutputError, match=r"^cache must be writable, got .*native \(.*; set XDG_CACHE_HOME to another"):
        number(source)


@pytest.mark.parametrize("left", [0, 100])
def test_a_damaged_library_is_compiled_once_more(left, source, cache, monkeypatch):
    # Not in this process, where it would stay loaded.
    subprocess.run([sys.executable, "-c", PROGRAM, source], capture_output=True, check=True)
    (file,) = cache.iterdir()
    os.truncate(file, left)
    with monkeypatch.context() as patch:
        without_wheel(patch)
        with pytest.raises(CompilerError, match=r"library must load, got .*; delete it"):
            number(source)
    assert number(source) == 1


def test_libraries_of_the_package_are_compiled_by_one_command(source, cache, monkeypatch, capsys):
    monkeypatch.setattr(build, "_PACKAGE", source.parents[1])
    monkeypatch.setattr(command, "LIBRARIES", {"tiny": ("code",)})
    monkeypatch.setattr(build, "LIBRARIES", {"tiny": ("code",)})
    build.packaged.cache_clear()
    assert command.main() == 0
    assert build.packaged("tiny") is build.packaged("tiny")
    assert len(list(cache.iterdir())) == 1

    build.packaged.cache_clear()
    source.write_text("wrong\n")
    assert command.main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: C code must compile with ")
    build.packaged.cache_clear()


@pytest.fixture
def wheel(source, cache, monkeypatch):
    """The library that a wheel has, from the sources of this package."""
    monkeypatch.setattr(build, "_PACKAGE", source.parents[1])
    monkeypatch.setattr(build, "LIBRARIES", {"tiny": ("code",)})
    # Whoever asks for flags of their own, such as sanitizers, gets no library of a wheel.
    monkeypatch.delenv(build.EXTRA_FLAGS, raising=False)
    build.packaged.cache_clear()
    path = build.shipped("tiny", source.parents[1])
    build.compile_c(path, compiler.find_compiler(), [source])
    yield path
    build.packaged.cache_clear()


def test_a_wheel_with_libraries_needs_no_compiler(wheel, cache, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    assert build.packaged("tiny").number() == 1
    assert not cache.exists()


def test_what_is_not_the_library_of_a_wheel_is_compiled(wheel, source, cache, monkeypatch):
    """Other flags, other sources, another platform."""
    monkeypatch.setenv(build.EXTRA_FLAGS, "-DNUMBER=2")
    assert build.packaged("tiny").number() == 2
    monkeypatch.delenv(build.EXTRA_FLAGS)
    build.packaged.cache_clear()
    source.write_text(SOURCE.replace("sqrt(", "2 + sqrt("))
    assert build.packaged("tiny").number() == 3
    build.packaged.cache_clear()
    build.shipped("tiny", source.parents[1]).write_bytes(b"of another platform")
    assert build.packaged("tiny").number() == 3
    assert len(list(cache.iterdir())) == 2


def test_every_folder_of_a_library_has_c_files():
    parts = {build._PACKAGE / part for parts in build.LIBRARIES.values() for part in parts}
    assert [part for part in parts if not (part.is_file() if part.suffix else list(part.glob("*.c")))] == []
