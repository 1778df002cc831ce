"""Signatures of the libraries' functions that we call, read from their published sources without importing them.

    python read_signatures.py UNPACKED_FOLDER ... > signatures.json

Each folder holds one unpacked source distribution or wheel, named as the index names it; ``WANTED`` says where its
functions are defined.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

#: Distribution → file → functions and methods.
WANTED = {
    "flash_attn": {"flash_attn/flash_attn_interface.py": ("flash_attn_with_kvcache", "flash_attn_varlen_func")},
    "flashinfer_python": {
        "flashinfer/prefill.py": tuple(
            f"BatchPrefillWithPagedKVCacheWrapper.{name}" for name in ("__init__", "plan", "run")
        )
    },
    "sgl_deep_gemm": {"deep_gemm/__init__.py": ("bf16_gemm_nt", "m_grouped_bf16_gemm_nt_contiguous")},
    "flash_mla": {"flash_mla/flash_mla_interface.py": ("get_mla_metadata", "flash_mla_with_kvcache")},
}


def parameters(function: ast.FunctionDef) -> list[list[str]]:
    """[name, kind] of each parameter but ``self``: needed, optional, keyword, or the sign of a catch-all."""
    a = function.args
    needed = len(a.args) - len(a.defaults)
    found = [[p.arg, "needed" if i < needed else "optional"] for i, p in enumerate(a.args)]
    found += [[a.vararg.arg, "*"]] if a.vararg else []
    found += [[p.arg, "keyword"] for p in a.kwonlyargs]
    found += [[a.kwarg.arg, "**"]] if a.kwarg else []
    return [p for p in found if p[0] != "self"]


def definition(tree: ast.Module, name: str) -> ast.FunctionDef:
    """The last definition of a function, or of a ``Class.method``: earlier ones are overloads."""
    inside: ast.AST = tree
    *outer, last = name.split(".")
    for part in outer:
        inside = next(node for node in ast.walk(inside) if isinstance(node, ast.ClassDef) and node.name == part)
    return [node for node in ast.walk(inside) if isinstance(node, ast.FunctionDef) and node.name == last][-1]


def read(folder: Path) -> dict[str, list[list[str]]]:
    """Every wanted function of one unpacked distribution."""
    files = WANTED[folder.name.rpartition("-")[0]]
    return {
        name: parameters(definition(ast.parse((folder / file).read_text()), name))
        for file, names in files.items()
        for name in names
    }


if __name__ == "__main__":
    releases = []
    for folder in map(Path, sys.argv[1:]):
        lines = [f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in read(folder).items()]
        releases.append(f" {json.dumps(folder.name)}: {{\n" + ",\n".join(lines) + "\n }")
    print("{\n" + ",\n".join(releases) + "\n}")
