"""What the architecture tests ask of the source: modules, imports, cycles, lines. It reads files and imports none."""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Import:
    """One imported module. ``lazy``: inside a function; ``typing``: under ``if TYPE_CHECKING``."""

    target: str
    line: int
    lazy: bool
    typing: bool


@dataclass(frozen=True)
class Module:
    """One source file and its dotted name."""

    name: str
    path: Path

    @property
    def where(self) -> str:
        """The path as a reader would type it."""
        return os.path.relpath(self.path, ROOT)

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.where)

    @cached_property
    def statements(self) -> list[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
        """Its imports: the statement, whether it is inside a function, and whether it is for type checkers only."""
        return list(_statements(self.tree.body, lazy=False, typing=False))

    @property
    def package(self) -> str:
        """What relative imports start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def modules(*sources: Path) -> dict[str, Module]:
    """All modules below the source folders, by dotted name."""
    found = {}
    for source in sources:
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path)
    return found


def imports(module: Module, known: Iterable[str]) -> list[Import]:
    """The modules that ``module`` imports. ``from a import b`` is ``a.b`` if that is one of ``known``, else ``a``."""
    known = set(known)
    found = []
    for node, lazy, typing in module.statements:
        if isinstance(node, ast.Import):
            targets = {alias.name for alias in node.names}
        else:
            base = _absolute(node, module)
            full = {f"{base}.{alias.name}" for alias in node.names}
            targets = {name if name in known else base for name in full}
        found += [Import(target, node.lineno, lazy, typing) for target in sorted(targets)]
    return found


def named_modules(module: Module, among: Mapping[str, Module]) -> list[Import]:
    """The modules of ``among`` that ``module`` names in a string, as ``"package.module"`` or ``"package.module:name"``.

    Such a string stands for an import that happens later. Docstrings do not count, nor do names of packages: loggers
    and groups of entry points have the same.
    """
    known = {name for name, each in among.items() if each.path.name != "__init__.py"}
    ignored = set()  # each after its statement, which ``walk`` gives first
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            ignored.add(id(node.value))
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in ignored
            and (target := node.value.partition(":")[0]) in known
        ):  # fmt: skip
            found.append(Import(target, node.lineno, lazy=True, typing=False))
    return found


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    base = module.package.split(".")
    base = base[: len(base) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def _statements(
    body: Iterable[ast.AST], *, lazy: bool, typing: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, lazy, typing
        elif isinstance(node, ast.If) and any(_names_checking(part) for part in ast.walk(node.test)):
            yield from _statements(node.body, lazy=lazy, typing=True)
            yield from _statements(node.orelse, lazy=lazy, typing=typing)
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):  # no statement is inside an expression
            inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _statements(ast.iter_child_nodes(node), lazy=inside, typing=typing)


def _names_checking(node: ast.AST) -> bool:
    return "TYPE_CHECKING" in (getattr(node, "id", ""), getattr(node, "attr", ""))


def cycle(graph: Mapping[str, Iterable[str]]) -> list[str] | None:
    """The names along one cycle, the first repeated at the end; None if there is none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        path.append(name)
        for target in sorted(graph.get(name, ())):
            if found := visit(target):
                return found
        path.pop()
        done.add(name)
        return None

    for name in sorted(graph):
        if found := visit(name):
            return found
    return None


def words(line: str) -> set[str]:
    """The lower-case words of a line, identifiers cut at underscores, digits and capitals."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", line)}


@cache
def code_lines(module: Module) -> int:
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    docstrings = set().union(*(_docstring_lines(node) for node in _scopes(module.tree)), set())
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def functions(module: Module) -> Iterator[tuple[str, int]]:
    """Name and number of lines, docstring not counted, of every function."""
    for node in _scopes(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None, "ast.parse sets it"
            yield node.name, node.end_lineno - node.lineno + 1 - len(_docstring_lines(node))


def _scopes(node: ast.AST) -> Iterator[ast.AST]:
    """A module with its classes and functions, however deep. Expressions, most of a tree, hold none."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _scopes(child)


def _docstring_lines(node: ast.AST) -> set[int]:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
        return set()
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        assert first.end_lineno is not None, "ast.parse sets it"
        return set(range(first.lineno, first.end_lineno + 1))
    return set()
