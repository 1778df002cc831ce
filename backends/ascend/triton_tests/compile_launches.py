"""Compiles launches of Triton kernels for an Ascend chip, down to HIVM with its plan of the on-chip memory.

    python compile_launches.py CHIP < launches.json > errors.json     CHIP: Ascend910B2, Ascend910_9391, Ascend910_9589

Runs over Huawei's Triton (``triton_environment``). Reads launches as ``aot.py --list`` writes them; prints a list with
null, or the compiler's reason, for each. After HIVM comes ``hivmc``, which is only in CANN: what has reached that step
has compiled as far as it can here.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ascendnpuir
from triton._C.libtriton import ir
from triton.backends.ascend import compiler
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_PROGRAMS = Path(ascendnpuir.__file__).parent / "bin"
#: As triton-ascend itself calls it; multi-buffering and the division of blocks are on before the 950.
_OPTIONS = ("--enable-hfusion-compile=true", "--enable-hivm-compile=true", "--enable-triton-kernel-compile=true")
_BEFORE_950 = ("--enable-auto-multi-buffer=True", "--enable-auto-bind-sub-block=True")
#: What the compiler writes when HIVM is done.
_DONE = "module.hivm.opt.mlir"
_ERROR = re.compile(r"error: |Error: |UNREACHABLE")


def lowered(launch: dict[str, Any], chip: str) -> str:
    """The kernel as linalg over Ascend's dialects."""
    function = getattr(importlib.import_module(launch["module"]), launch["name"])
    source = ASTSource(fn=function, signature=launch["signature"], constants=launch["constants"])
    backend = compiler.AscendBackend(GPUTarget("npu", chip, 0))
    newer = _is_950(chip)
    settings = {"compile_on_910_95": newer, "enable_select_analysis": newer, "multibuffer": not newer,
                "enable_auto_bind_sub_block": not newer}  # fmt: skip
    options, context = backend.parse_options(settings), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"hash": launch["name"], **options.__dict__}
    module = compiler.make_ttir(module, metadata, options)
    text = compiler.ttir_to_linalg(module, metadata, options, named_ops=True)
    found: str = compiler._parse_linalg_metadata(text, metadata)[0]
    return found


def _is_950(chip: str) -> bool:
    return chip.startswith("Ascend910_95")


def error_of(launch: dict[str, Any], chip: str) -> str | None:
    """The first error line of the compilers; None if the launch compiles."""
    try:
        text = lowered(launch, chip)
    except subprocess.CalledProcessError as error:
        return _first(error.stderr.decode(errors="replace"))
    except Exception as error:  # a compiler's; it is the finding
        cause: BaseException = error
        while cause.__cause__ is not None:  # Triton wraps the error of a function in that of its caller
            cause = cause.__cause__
        return str(getattr(cause, "error_message", None) or cause)[-300:]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.mlir"
        source.write_text(text)
        program = _PROGRAMS / ("bishengir-compile-a5" if _is_950(chip) else "bishengir-compile")
        options = [*_OPTIONS, *(() if _is_950(chip) else _BEFORE_950)]
        command = [program, source, f"--target={chip}", *options, f"--save-temps={folder}", "-o", f"{folder}/kernel"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if list(Path(folder).rglob(_DONE)):
            return None
        return _first(done.stderr + done.stdout)


def _first(text: str) -> str:
    """The first error of what a compiler prints, without its place."""
    lines = [line.strip() for line in text.splitlines() if _ERROR.search(line)]
    reasons = [line for line in lines if "pipeline" not in line.lower()] or lines or [text.strip()[-300:]]
    return re.sub(r"^(loc\([^)]*\)|\S+:\d+:\d+): (error: )?", "", reasons[0])[:300]


if __name__ == "__main__":
    print(json.dumps([error_of(launch, sys.argv[1]) for launch in json.load(sys.stdin)]))
