"""Which functions of a package a check of the kit calls. The package says so itself, in a copy with a note at the start
of each function: a tracer would make Triton's interpreter take several times as long."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar


class Called:
    """Names of the functions that were called since ``take``, as ``path:Class.method``. The child process is its only
    user."""

    names: ClassVar[set[str]] = set()

    @classmethod
    def take(cls) -> list[str]:
        """The names, which are then forgotten."""
        found, cls.names = sorted(cls.names), set()
        return found


def functions_of(source: str) -> list[tuple[str, ast.FunctionDef]]:
    """Every function of a file with its qualified name: of its classes and of the functions around it, too."""

    def found(node: ast.AST, around: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            inner = f"{around}{child.name}." if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else around
            if isinstance(child, ast.FunctionDef):
                yield inner.rstrip("."), child
            yield from found(child, inner)

    return list(found(ast.parse(source), ""))


def add_notes(folder: Path) -> None:
    """Add a note to each function of the Python files in a folder."""
    for path in sorted(folder.rglob("*.py")):
        path.write_text(with_notes(path.read_text("utf-8"), str(path.relative_to(folder))), "utf-8")


def with_notes(source: str, path: str) -> str:
    """The source of the file ``path`` with the notes. Lines of code keep their order, but not their numbers."""
    lines = source.splitlines(keepends=True)
    functions = functions_of(source)
    for qualified, node in sorted(functions, key=lambda each: each[1].body[0].lineno, reverse=True):
        first = node.body[0]
        if first.lineno == node.lineno:  # on the line of ``def``
            continue
        name = f"{path}:{qualified}"
        note = f'{" " * first.col_offset}__import__("mutation.reach").reach.Called.names.add({name!r})\n'
        decorators = first.decorator_list if isinstance(first, ast.FunctionDef) else []
        at = min([first.lineno, *(each.lineno for each in decorators)]) - 1
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):  # a docstring stays the first
            at = first.end_lineno or first.lineno
        lines.insert(at, note)
    return "".join(lines)
