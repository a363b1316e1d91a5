"""Mutants of the engine: each leaves out one wait, one record_stream, or one hold on a gradient, for a while.

The statement is cut out of the module's source, and the function that held it runs the new code until the block ends.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import gpipe_bench.engine

__all__ = ["Mutant", "mutants"]

# The last two are functions of the engine that wait for a stream of each partition.
NAMES = ("wait_stream", "record_stream", "keep", "after", "order_streams")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One statement to leave out.

    Attributes:
        module: where it stands.
        function: qualified name of the function.
        nth: which of the statements of that function, from 0.
        statement: its source.
    """

    module: str
    function: str
    nth: int
    statement: str

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.function}#{self.nth}: {self.statement}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the engine without the statement."""
        module = importlib.import_module(self.module)
        function = _function(module, self.function)
        original = function.__code__
        tree = _Cut(self).visit(ast.parse(inspect.getsource(module)))
        compiled = compile(ast.fix_missing_locations(tree), module.__file__ or "", "exec")
        function.__code__ = next(code for code in _codes(compiled) if code.co_qualname == self.function)
        try:
            yield
        finally:
            function.__code__ = original


def mutants() -> list[Mutant]:
    """Every statement of the engine that waits for streams, records one or holds on to what one reads."""
    found = []
    for info in pkgutil.walk_packages(gpipe_bench.engine.__path__, "gpipe_bench.engine."):
        module = importlib.import_module(info.name)
        finder = _Finder(info.name)
        finder.visit(ast.parse(inspect.getsource(module)))
        found += finder.mutants
    return found


class _Scoped(ast.NodeVisitor):
    """Knows the qualified name of the function it is in, and counts its statements."""

    def __init__(self) -> None:
        self.scope: list[str] = []
        self.counts: dict[str, int] = {}

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return self.inside(node, [node.name])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self.inside(node, [node.name, "<locals>"])

    def inside(self, node: ast.AST, names: list[str]) -> Any:
        self.scope += names
        result = self.generic_visit(node)
        del self.scope[-len(names) :]
        return result

    def numbered(self, node: ast.Expr) -> tuple[str, int] | None:
        """The function and the number of a statement, if it is one of those to leave out."""
        call = node.value
        if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] not in NAMES:
            return None
        function = ".".join(self.scope[:-1])
        nth = self.counts.get(function, 0)
        self.counts[function] = nth + 1
        return function, nth


class _Finder(_Scoped):
    def __init__(self, module: str) -> None:
        super().__init__()
        self.module = module
        self.mutants: list[Mutant] = []

    def visit_Expr(self, node: ast.Expr) -> None:
        number = self.numbered(node)
        if number is not None:
            self.mutants.append(Mutant(self.module, *number, ast.unparse(node)))


class _Cut(_Scoped, ast.NodeTransformer):
    def __init__(self, mutant: Mutant) -> None:
        super().__init__()
        self.mutant = mutant

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if self.numbered(node) == (self.mutant.function, self.mutant.nth) else node


def _function(module: ModuleType, name: str) -> FunctionType:
    owner: Any = module
    for part in name.split("."):
        # A static method of a class: the class gives the plain function.
        owner = getattr(owner, part)
    return inspect.unwrap(owner)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
