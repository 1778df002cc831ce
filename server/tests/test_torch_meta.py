"""``import torch`` leaves out kernels for tensors without data, and they are there before anything can miss them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: A torch with the parts that matter: kernels that register once, and modules that need them or are needed by them.
FILES = {
    "__init__.py": "log = []\nfrom torch import _meta_registrations\nimport torch.own\n",
    "own.py": "",
    "_meta_registrations.py": "import torch\ntorch.log.append('registered')\nimport torch._refs\nkernel = 1\n",
    "_refs.py": "import torch, torch._meta_registrations\ntorch.log.append('refs')\n",
    "compiler.py": "import torch\ntorch.log.append('compiler')\n",
}
BEGIN = "import sys\nfrom evener_server.torch_meta import meta_kernels_later\nmeta_kernels_later()\nimport torch\n"
END = "\nprint(torch.log)\n"


def say(script: str, folder: Path | None = None) -> str:
    """What ``script`` prints in a process of its own, with the packages in ``folder`` first."""
    found = "" if folder is None else f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    done = subprocess.run([sys.executable, "-c", found + script], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def small_torch(tmp_path: Path) -> Path:
    (tmp_path / "torch").mkdir()
    for name, text in FILES.items():
        (tmp_path / "torch" / name).write_text(text)
    (tmp_path / "torch_device.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("more", "log"),
    [
        ("", []),
        ("import json, torch.own", []),
        ("import inspect; inspect.getmodule(inspect.currentframe())", []),
        ("import torch._meta_registrations", []),
        ("from torch._meta_registrations import kernel", ["registered", "refs"]),
        ("assert torch._meta_registrations.kernel == 1", ["registered", "refs"]),
        ("import torch._refs", ["registered", "refs"]),
        ("import torch_device", ["registered", "refs"]),
        ("import torch.compiler", ["registered", "refs", "compiler"]),
    ],
)
def test_they_are_registered_once_before_more_of_torch_is_imported(
    small_torch: Path, more: str, log: list[str]
) -> None:
    assert say(BEGIN + more + END, small_torch) == str(log)


def test_nothing_of_it_is_left_once_they_are_registered(small_torch: Path) -> None:
    script = "import torch._refs\nm = sys.modules['torch._meta_registrations']\nprint(type(m).__name__, "
    script += "len(sys.meta_path), type(torch._refs.__spec__.loader).__name__)"
    finders = len(sys.meta_path)
    plain = say(f"import sys\nprint(len(sys.meta_path), {finders})", small_torch).split()[0]
    assert say(BEGIN + script, small_torch) == f"module {plain} SourceFileLoader"


def test_a_name_that_the_module_has_not_is_missed_as_in_any_module(small_torch: Path) -> None:
    script = "\ntry:\n    torch._meta_registrations.no_such\nexcept AttributeError as error:\n    print(error)"
    assert say(BEGIN + script, small_torch) == "module 'torch._meta_registrations' has no attribute 'no_such'"


def test_an_imported_torch_stays_as_it_is(small_torch: Path) -> None:
    script = BEGIN.replace(
        "meta_kernels_later()\n", "import torch\nbefore = list(sys.meta_path)\nmeta_kernels_later()\n"
    )
    assert say(script + "\nprint(sys.meta_path == before)", small_torch) == "True"


def test_an_import_that_failed_can_be_made_again(small_torch: Path) -> None:
    broken = FILES["__init__.py"] + "import os\nif 'GOOD' not in os.environ:\n    raise ImportError('no library')\n"
    (small_torch / "torch" / "__init__.py").write_text(broken)
    script = BEGIN.replace(
        "import torch\n", "try:\n    import torch\nexcept ImportError:\n    import os, torch_device\n"
    )
    script += "os.environ['GOOD'] = '1'\nimport torch\nprint(torch._meta_registrations.kernel)"
    assert say(script, small_torch) == "1"


def test_threads_that_ask_at_once_wait_for_the_one_that_registers(small_torch: Path) -> None:
    slow = "import time\nimport torch\ntorch.log.append('registered')\ntime.sleep(0.2)\nkernel = 1\n"
    (small_torch / "torch" / "_meta_registrations.py").write_text(slow)
    script = "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n"
    script += "    print(list(pool.map(lambda n: torch._meta_registrations.kernel, range(4))), torch.log)"
    assert say(BEGIN + script, small_torch) == "[1, 1, 1, 1] ['registered']"


META = """
x = torch.empty(3, 4, device="meta")
print("torch._refs" in sys.modules, torch.index_select(x, 0, torch.zeros(2, dtype=torch.long, device="meta")).shape)
"""


def test_torch_itself_is_imported_without_them_and_has_them_when_asked() -> None:
    # A start of torch, the only way to see that its own import needs none of them.
    script = "print('torch._refs' in sys.modules)\nfrom torch._meta_registrations import meta_index_Tensor" + META
    assert say(BEGIN + script).splitlines() == ["False", "True torch.Size([2, 4])"]


@pytest.mark.slow  # other ways to ask torch itself; those above ask a small one
@pytest.mark.parametrize(
    "first",
    [
        "import torch._refs", "import torch._prims", "import torch._decomp", "import torch._dynamo",
        "assert torch.equal(torch.compile(torch.sin, backend='eager')(torch.ones(3)), torch.ones(3).sin())",
        "from torch._subclasses.fake_tensor import FakeTensorMode\nwith FakeTensorMode():\n"
        "    torch.linalg.svd(torch.empty(3, 3))",
    ],
)  # fmt: skip
def test_torchs_compiler_and_fake_tensors_find_them(first: str) -> None:
    assert say(BEGIN + first + META).splitlines()[-1] == "True torch.Size([2, 4])"
