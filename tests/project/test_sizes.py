"""Files and functions stay short enough to be read at once."""

from __future__ import annotations

import ast

from tests.project.tree import texts

LONGEST_FILE = 400
LONGEST_FUNCTION = 60


def test_files_are_short():
    lengths = {
        name: text.count("\n") for name, text in texts(".py", ".c", ".h", ".smk", ".sh", "Snakefile", "Makefile")
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_functions_are_short():
    long = []
    for name, text in texts(".py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    long.append(f"{name}:{node.lineno} {node.name} has {length} lines")
    assert long == []
