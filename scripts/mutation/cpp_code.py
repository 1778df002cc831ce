"""Mutants of C++ source text.

Binary operators have a space on each side (clang-format), and template brackets and declared pointers have not: that
tells them apart without a parser. Comments, strings, preprocessor lines and static assertions are left alone. What does
not compile is no mutant; the compiler says so when it is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mutation.mutant import Mutant

#: Comments, strings, characters, preprocessor lines with their continuations.
_NOT_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
    re.DOTALL | re.MULTILINE,
)
_SWAPPED = {
    " + ": (" - ",), " - ": (" + ",), " * ": (" + ",), " / ": (" * ",), " % ": (" / ",), " << ": (" >> ",),
    " >> ": (" << ",), " += ": (" -= ",), " -= ": (" += ",),
}  # fmt: skip
_BOUNDS = {" < ": (" <= ",), " <= ": (" < ",), " > ": (" >= ",), " >= ": (" > ",)}
_MASKS = {" && ": (" || ",), " || ": (" && ",), " & ": (" | ",), " | ": (" & ",), " == ": (" != ",), " != ": (" == ",)}
_NUMBER = re.compile(r"(?<![\w.])([1-9]\d*)(?![\w.]|L\b)")
_STRIDE = re.compile(r" \* ([a-z_]\w*(?:\.\w+)?)(?![\w(.\[<>])")
#: An addend that is a name, an index or a call, or a product of two of them.
_TERM = r"[a-z_]\w*(?:\.\w+)*(?:\((?:[^()]|\([^()]*\))*\)|\[[^\[\]]*\])?"
_ADDEND = re.compile(rf"(?<=[\w)\]]) \+ {_TERM}(?: \* {_TERM})?(?=[;,)\]?: ])")
_STORED = re.compile(r"\b(put|store)\(([^,()]*(?:\([^()]*\))?[^,()]*), ((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\);")
_CHOICE = re.compile(r"(?<=[(=,] )([a-z_][\w.]*(?: (?:==|!=|<|>) [\w.]+)?) \? ")
_CHOICE_RETURN = re.compile(r"\breturn ([a-z_][\w.]*) \? ")


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of its operators, then of its text."""
    blank = _NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), source)

    def make(start: int, end: int, after: str, operator: str) -> Mutant:
        return Mutant.at(file, source, start, end, after, operator)

    for table, operator in ((_SWAPPED, "swapped operator"), (_BOUNDS, "bound"), (_MASKS, "mask")):
        for before, others in table.items():
            for found in re.finditer(re.escape(before), blank):
                # A space that ends a blanked comment is no operator's.
                if source[found.start() : found.end()] == before:
                    yield from (make(found.start(), found.end(), after, operator) for after in others)
    for found in _NUMBER.finditer(blank):
        for by in (1, -1):
            yield make(*found.span(1), str(int(found[1]) + by), "off by one")
    for found in _STRIDE.finditer(blank):
        yield make(*found.span(1), f"({found[1]} + 1)", "stride")
    for found in _ADDEND.finditer(blank):
        yield make(*found.span(), "", "dropped addend")
    for found in _STORED.finditer(blank):
        if "\n" not in found[0]:
            narrow = "rounded1<bf16>" if found[1] == "put" else "rounded<bf16>"
            yield make(*found.span(3), f"{narrow}({found[3]})", "wrong dtype")
    for pattern in (_CHOICE, _CHOICE_RETURN):
        for found in pattern.finditer(blank):
            for after in ("true", "false"):
                yield make(*found.span(1), after, "ignored condition")
