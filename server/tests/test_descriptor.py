"""The package as core sees it."""

from __future__ import annotations

import subprocess
import sys

from importlib_metadata import entry_points

from evener_server import descriptor


def test_the_entry_point_is_the_descriptor() -> None:
    (found,) = [point for point in entry_points(group="evener.plugins") if point.name == "server"]
    assert found.load() is descriptor
    assert descriptor.commands == {
        "serve": "evener_server.command:main",
        "run": "evener_server.run_command:main",
        "chat": "evener_server.chat_command:main",
        "client": "evener_server.client_command:main",
        "completion": "evener_server.completion_script:main",
    }


def test_importing_the_descriptor_imports_neither_torch_nor_a_web_server() -> None:
    heavy = {"torch", "fastapi", "pydantic", "uvicorn", "transformers"}
    code = f"import sys, evener_server; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_server_itself_never_imports_torch() -> None:
    code = "import sys, evener_server.command; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
