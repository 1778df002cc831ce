"""The environment of these tests: torch_npu's wheel from the package index, and a fake Ascend runtime that it loads.

``python environment.py`` makes it if it is not there, and prints what to export. Its folder's name is a hash of
everything it depends on.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

#: It must have the version of the torch that runs the tests.
WHEEL = "torch_npu==2.13.0"
#: An older release, whose binary is read and never loaded.
OLDER_WHEEL = "torch_npu==2.11.0"
_HERE = Path(__file__).resolve().parent
#: The libraries of CANN that torch_npu's own libraries name.
_NEEDED = ("libascendcl", "libhccl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel")
#: With torch_npu's kernels over Huawei's transformer library, libatb, which is not CANN's.
_ATB = "lib/libop_plugin_atb.so"
_OWN = ("lib/libtorch_npu.so", "lib/libtensorpipe.so", "lib/libnpu_profiler.so", _ATB)
#: Names of C functions of CANN; others that are undefined come from torch and the C library.
_PREFIXES = re.compile(r"^(acl|Hccl|rt[A-Z]|Msprof|ge[A-Z]|hal|prof[A-Z]|ad[A-Z])\w*$")
#: Functions that compute, and an optional one of the driver whose absence is handled.
_COMPUTE = re.compile(r"^acl(op|nn)[A-Z]")
_ABSENT = {"halGetAPIVersion"}


def main() -> int:
    """Make the environment and print its variables as lines for ``export``."""
    folder = environment()
    print(f"PYTHONPATH={folder / 'site'}")
    print(f"LD_LIBRARY_PATH={folder / 'lib'}")
    print(f"ASCEND_OLDER_LIBRARY={folder / 'older/torch_npu/lib/libtorch_npu.so'}")
    return 0


def environment() -> Path:
    """The folder with ``site`` (torch_npu), ``older`` (the older release) and ``lib`` (the fake runtime)."""
    sources = [Path(__file__).read_bytes(), (_HERE / "fake_acl.c").read_bytes()]
    facts = repr((WHEEL, OLDER_WHEEL, torch.__version__, sys.version_info[:2])).encode()
    key = hashlib.sha256(b"\0".join([*sources, facts])).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "evener/vendors"
    folder = root / f"ascend-{key}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=root))
    try:
        for wheel, target in ((WHEEL, "site"), (OLDER_WHEEL, "older")):
            _run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(made / target), wheel)
        _make_runtime(made / "site/torch_npu", made / "lib")
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _make_runtime(package: Path, lib: Path) -> None:
    """Compile the libraries of CANN that torch_npu loads."""
    lib.mkdir()
    own = [*(package / name for name in _OWN), next(package.glob("_C.*.so"))]
    source = (_HERE / "fake_acl.c").read_text("utf-8")
    written = set(re.findall(r"^[\w ]+[ *](\w+)\(", source, re.MULTILINE))
    names = sorted(_wanted_names(own) - written - _ABSENT)
    stubs = [f"int {name}(void) {{ return {500000 if _COMPUTE.match(name) else 0}; }}\n" for name in names]
    (lib / "runtime.c").write_text(source + "".join(stubs))
    first, *others = (lib / f"{name}.so" for name in _NEEDED)
    _run("gcc", "-shared", "-fPIC", "-w", "-o", str(first), str(lib / "runtime.c"))
    _make_transformer_library(package / _ATB, lib)
    for other in others:  # one file, so that its memory and its streams exist once
        other.symlink_to(first.name)


def _make_transformer_library(user: Path, lib: Path) -> None:
    """Compile a libatb whose every function returns an error: the kernels are registered, and none computes."""
    undefined = _run("nm", "-D", "--undefined-only", str(user)).split()
    names = sorted(name for name in undefined if name.startswith("_ZN3atb"))
    assert names, "torch_npu's library names no function of libatb"
    (lib / "atb.c").write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in names))
    _run("gcc", "-shared", "-fPIC", "-w", "-o", str(lib / "libatb.so"), str(lib / "atb.c"))


def _wanted_names(libraries: list[Path]) -> set[str]:
    """Functions of CANN that the libraries name: undefined symbols, and names that they look up at run time."""
    names: set[str] = set()
    for library in libraries:
        undefined = _run("nm", "-D", "--undefined-only", str(library)).split()
        texts = re.findall(rb"[A-Za-z]\w{4,}", library.read_bytes()) if library.name == "libtorch_npu.so" else []
        names.update(name for name in undefined if _PREFIXES.match(name))
        looked_up = {text.decode() for text in texts}
        # An aclnn function without a library of its own must not be found, so that its op fails.
        names.update(n for n in looked_up if re.match(r"^(aclrt|aclmdl|aclsys|aclop|aclprof|acl[A-Z]|Hccl)\w*$", n))
    return {name for name in names if not name.startswith("aclnn")}


def _run(*command: str) -> str:
    """The output of a command.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
