"""Torch's Python kernels for tensors without data are loaded by the first such tensor, and are then all there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from evener_server.torch_meta_kernels import load_meta_kernels_later

LATER = """
import sys
from evener_server.torch_meta_kernels import load_meta_kernels_later
load_meta_kernels_later()
import torch
def loaded():
    return "torch._decomp.decompositions" in sys.modules
print(loaded())
assert torch.ones(3, 4).sum() == 12 and not loaded()
"""
#: Each makes the first tensor without data in another way, or asks for the kernels before that.
FIRST = (
    "x = torch.zeros(3, 4, device='meta')",
    "x = torch.ones(3, 4).to('meta')",
    "torch._meta_registrations.meta_linspace_logspace; x = torch.rand(3, 4, device='meta')",
    # The kernels import this module, in a circle that ends well only after ``import torch`` as it is otherwise.
    "import torch.utils._content_store as c; assert c is torch.utils._content_store and c.__spec__.origin"
    "\nassert c.ContentStoreReader is torch._prims.debug_prims.ContentStoreReader; x = torch.ones(3, 4).to('meta')",
    "from torch._subclasses.fake_tensor import FakeTensorMode\n"
    "with FakeTensorMode(): assert (torch.ones(2, 3) @ torch.ones(3, 2)).shape == (2, 2)\n"
    "x = torch.zeros(3, 4, device='meta')",
)
# An op whose only kernel without data is one of Python's, and one that has another in C++.
THEN = """
assert loaded()
assert torch.linalg.svd(x)[0].shape == (3, 3) and torch.linalg.svd(x)[0].is_meta
assert (x + 1).shape == (3, 4)
assert not any(type(finder).__module__.startswith("evener_server") for finder in sys.meta_path)
assert torch._meta_registrations.meta_linspace_logspace and "__getattr__" not in vars(torch._meta_registrations)
assert torch.ops.aten.empty.memory_format([2], device="meta").shape == (2,)
assert getattr(torch._meta_registrations, "nothing_of_this_name", 7) == 7
"""
#: A child of a process for each way: torch is imported once.
EACH = """
import json, os
ways, then = json.loads(sys.stdin.read())
for way in ways:
    child = os.fork()
    if not child:
        try:
            exec(way + then)
        except BaseException as error:
            print(f"{way}: {error!r}", flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, way
"""


def run(code: str, given: str = "") -> list[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    said = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout.splitlines()


def test_the_first_tensor_without_data_or_module_of_torch_loads_them() -> None:
    assert run(LATER + EACH, json.dumps([FIRST, THEN])) == ["False"]


def test_ops_have_the_kernels_that_they_have_otherwise() -> None:
    names = (
        "names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(('aten::', 'quantized::'))]\n"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "print(sorted(n for n in names if has(n, 'Meta')))"
    )
    assert run(LATER + FIRST[0] + "\n" + names)[1:] == run("import torch\n" + names)


def test_once_torch_is_imported_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.meta_path)
    monkeypatch.setitem(sys.modules, "torch", sys)
    load_meta_kernels_later()
    assert sys.meta_path == before
