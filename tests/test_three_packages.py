"""Core, models and a backend, with what these require: a model runs, without the kit and all other packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: Nothing of ours but these is found as a package, and nothing else of ours can be imported.
RUN = """
import sys
from importlib.abc import MetaPathFinder

INSTALLED = {"evener", "evener_models", "evener_encoders", "evener_formats", "evener_convert", "evener_calibrate",
             "evener_quantize", "evener_keys", "evener_model_cache", "evener_backend_cpu"}


class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("evener") and name.partition(".")[0] not in INSTALLED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
from evener import LLM, SamplingParams
from evener.cli.main import main

with LLM(sys.argv[1], **{"infer.kv_memory": "16MiB", "infer.max_seq_len": 128, "infer.threads": 1}) as llm:
    greedy = SamplingParams(temperature=0, max_tokens=2)
    print("text:", llm.generate(["The capital of France is"], greedy)[0].outputs[0].text)
for command in ("conformance", "new"):
    assert main([command]) == 2
"""


def test_a_model_runs_without_the_conformance_kit_and_its_commands_say_what_to_install(smollm2_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(smollm2_dir)], capture_output=True, text=True, check=False,
        env={**os.environ, "EVENER_PLUGINS": "evener-models,evener-formats,evener-backend-cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "text:  Paris."
    assert done.stderr.count("needs a package that is not installed; type: pip install evener-conformance") == 2
