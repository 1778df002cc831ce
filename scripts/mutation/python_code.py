"""Mutants of Python source, found in its syntax tree and made in its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from mutation.mutant import Mutant

_SWAPPED: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
}  # fmt: skip
_BOUNDS: dict[type[ast.AST], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_MASKS: dict[type[ast.AST], str] = {
    ast.BitAnd: "|", ast.BitOr: "&", ast.Eq: "!=", ast.NotEq: "==", ast.And: "or", ast.Or: "and",
}  # fmt: skip
#: Dtypes by their narrower or wrong one.
_DTYPES = {"float32": "float16", "int64": "int32", "bfloat16": "float16"}
#: Calls that say something to a person, whose arguments are not computed with.
_MESSAGES = ("ValueError", "ConfigError", "BackendError", "NotImplementedError", "require", "optional", "range_error")

#: Arguments of launches that change nothing but speed.
_SPEED = ("num_warps", "num_stages", "eviction_policy", "cache_modifier")


class _Places:
    """Positions of nodes in the text."""

    def __init__(self, source: str) -> None:
        self.source, self._starts = source, [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = source.splitlines()

    def at(self, line: int, column: int) -> int:
        """Offset in characters; the syntax tree counts bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None, "parsed from text"
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def between(self, left: ast.expr, right: ast.expr, sign: str) -> tuple[int, int]:
        """The sign between two operands, which may have parentheses around them."""
        start, end = self.span(left)[1], self.span(right)[0]
        at = self.source.index(sign, start, end)
        return at, at + len(sign)


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """Every mutant inside of the functions of a file, in the order of its text. Annotations, defaults, messages,
    ``assert`` and conditions under which a function only raises are left alone."""
    places = _Places(source)
    for start, end, after, operator in _changes(_bodies(ast.parse(source)), places):
        if "\n" not in source[start:end]:
            yield Mutant.at(file, source, start, end, after, operator)


def _bodies(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of the outermost functions."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from (s for each in node.body if isinstance(each, ast.FunctionDef) for s in each.body)
        elif isinstance(node, ast.FunctionDef):
            yield from node.body


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.Assert, ast.Raise, ast.JoinedStr)):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _MESSAGES:
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name == "test" and _only_refuses(node):
            continue
        if name in ("annotation", "returns", "defaults", "kw_defaults", "decorator_list"):
            continue
        if isinstance(node, ast.keyword) and node.arg in _SPEED:
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from _walk(each)


def _only_refuses(node: ast.AST) -> bool:
    """Whether this is ``if …: raise …``, a check of arguments that no caller of the kit gets wrong."""
    return isinstance(node, ast.If) and not node.orelse and all(isinstance(each, ast.Raise) for each in node.body)


def _changes(statements: Iterator[ast.stmt], places: _Places) -> Iterator[tuple[int, int, str, str]]:
    for statement in statements:
        for node in _walk(statement):
            yield from _changes_of(node, places)


def _changes_of(node: ast.AST, places: _Places) -> Iterator[tuple[int, int, str, str]]:
    if isinstance(node, ast.BinOp):
        sign = _sign(node.op)
        if (kind := type(node.op)) in _SWAPPED:
            yield *places.between(node.left, node.right, sign), _SWAPPED[kind], "swapped operator"
        if kind in _MASKS:
            yield *places.between(node.left, node.right, sign), _MASKS[kind], "mask"
            yield *places.span(node), places.source[slice(*places.span(node.left))], "dropped mask"
        if kind is ast.Add:
            yield *places.span(node), places.source[slice(*places.span(node.left))], "dropped addend"
    elif isinstance(node, ast.AugAssign) and type(node.op) in _SWAPPED:
        at = places.source.index(_sign(node.op) + "=", places.span(node.target)[1])
        yield at, at + len(_sign(node.op)), _SWAPPED[type(node.op)], "swapped operator"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        comparison, sign = type(node.ops[0]), _sign(node.ops[0])
        for table, operator in ((_BOUNDS, "bound"), (_MASKS, "mask")):
            if comparison in table:
                yield *places.between(node.left, node.comparators[0], sign), table[comparison], operator
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield *places.between(left, right, _sign(node.op)), _MASKS[type(node.op)], "mask"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield from ((*places.span(node), str(node.value + by), "off by one") for by in (1, -1))
    elif isinstance(node, ast.Constant) and type(node.value) is float:
        yield *places.span(node), repr(node.value + 0.5), "off by a half"
    elif isinstance(node, ast.IfExp):
        yield from ((*places.span(node.test), word, "ignored condition") for word in ("True", "False"))
    elif isinstance(node, ast.Attribute) and node.attr in _DTYPES:
        end = places.span(node)[1]
        yield end - len(node.attr), end, _DTYPES[node.attr], "wrong dtype"


def _sign(op: ast.AST) -> str:
    signs: dict[type[ast.AST], str] = {
        ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.BitAnd: "&",
        ast.BitOr: "|", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
        ast.And: "and", ast.Or: "or",
    }  # fmt: skip
    return signs.get(type(op), "")
