"""Markdown from the source of a module: docstring, classes, fields, methods, functions. It imports nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):$")
_ENTRY = re.compile(r"^    (\S.*?): (.*)$")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_text(path: Path) -> str:
    """Everything public in one module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lines = path.read_text(encoding="utf-8").splitlines()
    parts = [docstring(tree)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            parts.append(_class(node))
        elif isinstance(node, Function) and not node.name.startswith("_"):
            parts.append(_function(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            parts.append(_constant(node, lines))
    return "\n\n".join(part for part in parts if part)


def class_text(path: Path, name: str) -> str:
    """One class of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(_class(node) for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def docstring(node: ast.Module | ast.ClassDef | Function) -> str:
    """A docstring as Markdown: sections become lists, literal blocks become fences; empty if there is none."""
    text = ast.get_docstring(node) or ""
    return "\n".join(_markdown(text.splitlines())).strip()


def _markdown(lines: list[str]) -> Iterator[str]:
    section = False
    entry = ""
    literal: list[str] | None = None
    for line in [*lines, "end"]:
        if literal is not None:
            if not line or line.startswith(" "):
                literal.append(line[4:])
                continue
            yield "```\n" + "\n".join(literal).strip("\n") + "\n```\n"
            literal = None
        if line == "end":
            line = ""
        match = _ENTRY.match(line) if section else None
        if entry and (match or not line.startswith(" ")):
            yield entry
            entry = ""
        if _SECTION.match(line):
            section = True
            yield f"*{line}*"
            yield ""
        elif match:
            entry = f"- `{match[1]}`: {inline(match[2])}"
        elif section and line.startswith(" "):
            entry += (" " if entry else "- ") + inline(line.strip())
        elif line.endswith("::"):
            yield inline(line.removesuffix(":"))
            yield ""
            literal = []
        else:
            section = section and not line
            yield inline(line)


def inline(text: str) -> str:
    """Literals of reStructuredText as Markdown's."""
    return text.replace("``", "`")


def _class(node: ast.ClassDef) -> str:
    marks = " ".join(ast.unparse(each) for each in node.decorator_list)
    named = ", arguments by name only" if "kw_only=True" in marks else ""
    bases = [
        ast.unparse(base)
        for base in node.bases
        if ast.unparse(base) not in ("ABC", "Protocol", "NamedTuple", "TypedDict")
    ]
    known = {"Protocol": "protocol", "NamedTuple": "named tuple", "TypedDict": "typed dict"}
    bare = next((known[base] for base in map(ast.unparse, node.bases) if base in known), "class")
    kind = f"frozen dataclass{named}" if "frozen=True" in marks else bare
    parts = [f"### `{node.name}`", f"*{kind}{' of ' + ', '.join(bases) if bases else ''}*", docstring(node)]
    fields = [f"{ast.unparse(each)}" for each in node.body if isinstance(each, ast.AnnAssign)]
    if fields:
        parts.append("```python\n" + "\n".join(fields) + "\n```")
    methods = [_method(each) for each in node.body if isinstance(each, Function) and _shown(each)]
    if methods:
        parts.append("\n".join(methods))
    return "\n\n".join(part for part in parts if part)


def _shown(node: Function) -> bool:
    if node.name.startswith("_"):
        return node.name == "__call__"
    return bool(ast.get_docstring(node)) or _marked(node, "abstractmethod")


def _marked(node: Function, name: str) -> bool:
    return any(ast.unparse(each) == name for each in node.decorator_list)


def _method(node: Function) -> str:
    """One bullet: required, optional or neither; the signature; what it does."""
    text = docstring(node)
    if _marked(node, "property"):
        kind, shown = "property", f"{node.name}: {ast.unparse(node.returns) if node.returns else 'Any'}"
    else:
        kind, shown = ("**required**" if _marked(node, "abstractmethod") else ""), _signature(node)
    if text.startswith("(optional)"):
        kind, text = "(optional)", text.removeprefix("(optional)").strip()
    indented = "\n".join(f"  {line}".rstrip() for line in text.splitlines()).strip()
    return f"- {kind} `{shown}`".replace("-  `", "- `") + (f": {indented}" if indented else "")


def _signature(node: Function) -> str:
    arguments = ast.unparse(node.args)
    arguments = re.sub(r"^(self|cls)(, |$)", "", arguments)
    return f"{node.name}({arguments})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def _function(node: Function) -> str:
    return f"### `{_signature(node)}`\n\n{docstring(node)}"


def _constant(node: ast.Assign | ast.AnnAssign, lines: list[str]) -> str:
    """An assignment with a ``#:`` comment."""
    comments: list[str] = []
    number = node.lineno - 2
    while lines[number].startswith("#:"):
        comments.insert(0, lines[number].removeprefix("#:").strip())
        number -= 1
    if not comments:
        return ""
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return f"### `{ast.unparse(target)}`\n\n{inline(' '.join(comments))}\n\n```python\n{source}\n```"
