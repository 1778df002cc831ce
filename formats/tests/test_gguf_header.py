"""Hostile GGUF files: refused in a moment with one kind of error, and without memory that the file does not have."""

from __future__ import annotations

import struct
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evener.errors import CheckpointError, EvenerError
from evener.loading.checkpoint import open_checkpoint
from evener_formats.gguf import header as header_module
from evener_formats.gguf.header import GgufHeader, _Reader, read_header

Write = Callable[..., Path]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(
    *items: bytes, tensors: int = 0, pairs: int = 0, magic: bytes = b"GGUF", version: int = 3, data: int = 0
) -> bytes:
    head = magic + struct.pack("<IQQ", version, tensors, pairs) + b"".join(items)
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


NAME = pair("general.architecture", 8, text("llama"))
MALFORMED_HEADERS = {
    "it is truncated": b"GGUF",
    "does not begin with GGUF's magic number": file(magic=b"FUGG"),
    "it is big-endian": file(version=3 << 24),
    "of version 1; versions 2 and 3": file(version=1),
    "counts 1,152,921,504,606,846,976 items": file(pairs=1 << 60),
    "counts 1,000,000 items": file(tensors=1_000_000),
    "needs 9,223,372,036,854,775,808 bytes": file(struct.pack("<Q", 1 << 63) + b"x" * 64, pairs=1),
    "the unknown type 99": file(pair("a", 99, b"x" * 16), pairs=1),
    "items of the unknown type 9": file(pair("a", 9, struct.pack("<IQ", 9, 1 << 40) + b"x" * 16), pairs=1),
    "counts 1,099,511,627,776 items": file(pair("a", 9, struct.pack("<IQ", 8, 1 << 40)), pairs=1),
    "counts 4,611,686,018,427,387,904 items": file(pair("a", 9, struct.pack("<IQ", 12, 1 << 62)), pairs=1),
    "is not UTF-8": file(pair("a", 8, struct.pack("<Q", 2) + b"\xff\xfe" + b"x" * 16), pairs=1),
    "the key 'a' occurs twice": file(pair("a", 7, b"\1"), pair("a", 7, b"\1"), pairs=2),
    "general.alignment is 3": file(pair("general.alignment", 4, struct.pack("<I", 3)), pairs=1, data=64),
    "general.alignment is 0": file(pair("general.alignment", 4, struct.pack("<I", 0)), pairs=1, data=64),
    "general.alignment is True": file(pair("general.alignment", 7, b"\1"), pairs=1, data=64),
    "has 4,000,000,000 dimensions": file(text("w") + struct.pack("<I", 4_000_000_000) + b"x" * 64, tensors=1),
    "has GGUF's tensor type 15, which is not supported": file(tensor("w", [32], 15), tensors=1, data=64),
    "is q4_0 and has the impossible shape": file(tensor("w", [33], 2), tensors=1, data=64),
    "is mxfp4 and has the impossible shape []": file(tensor("w", [], 39), tensors=1, data=64),
    "has the impossible shape [4611686018427387904, 32]": file(tensor("w", [32, 1 << 62], 0), tensors=1, data=64),
    "but the file has": file(tensor("w", [64]), tensors=1, data=128),
    "offsets must be multiples of 32": file(tensor("w", [4], 0, 8), tensors=1, data=64),
    "'v' and 'w' overlap": file(tensor("v", [16]), tensor("w", [8], 0, 32), tensors=2, data=128),
    "the tensor 'w' occurs twice": file(tensor("w", [8]), tensor("w", [8], 0, 32), tensors=2, data=128),
}


@pytest.mark.parametrize("words", MALFORMED_HEADERS)
def test_a_malformed_header_is_an_error_that_says_what_is_wrong(words: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(MALFORMED_HEADERS[words])
    tracemalloc.start()
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path / "m.gguf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert words in str(error.value)
    assert peak < 5_000_000


def test_a_well_formed_header_gives_values_and_places(tmp_path: Path) -> None:
    numbers = pair("n", 9, struct.pack("<IQ3f", 6, 3, 1.5, 2.5, 3.5))
    words = pair("s", 9, struct.pack("<IQ", 8, 2) + text("é") + text(""))
    path = tmp_path / "m.gguf"
    path.write_bytes(file(NAME, numbers, words, tensor("w", [32, 2], 8), tensor("v", [3], 0, 96), tensors=2, pairs=3,
                          data=128))  # fmt: skip
    header = read_header(path)
    assert (list(header.metadata["n"]), header.metadata["s"]) == ([1.5, 2.5, 3.5], ["é", ""])
    w, v = header.tensors["w"], header.tensors["v"]
    assert (w.dtype, w.shape, w.end - w.begin, w.begin % 32) == ("q8_0", (2, 32), 68, 0)
    assert (v.dtype, v.shape, v.begin - w.begin) == ("float32", (3,), 96)


#: What a list of three texts ends with, and what is said about it.
BROKEN_LISTS = {
    "bytes at byte 75, but 21": text("a") + text("b") + struct.pack("<Q", 1 << 40) + b"x" * 16,
    "bytes at byte 66, but 30": text("a") + struct.pack("<Q", (1 << 64) - 4) + b"x" * 24,
    "the text at byte 77 is not UTF-8": text("a") + text("b") + struct.pack("<Q", 2) + b"\xff\xfe" + b"x" * 8,
}


@pytest.mark.parametrize("run", [1, 2, 3, 1 << 15])
@pytest.mark.parametrize("words", BROKEN_LISTS)
def test_a_broken_list_of_texts_is_an_error_that_says_where_also_in_a_later_run(
    words: str, run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header_module, "_RUN", run)
    (tmp_path / "m.gguf").write_bytes(file(pair("s", 9, struct.pack("<IQ", 8, 3) + BROKEN_LISTS[words]), pairs=1))
    with pytest.raises(CheckpointError, match=words):
        read_header(tmp_path / "m.gguf")


@pytest.mark.parametrize("run", [1, 2, 1 << 15])
def test_lists_of_texts_are_the_same_in_runs_of_any_length(
    run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header_module, "_RUN", run)
    texts = ["é", "", "a" * 300, "\0", "end"]
    items = struct.pack("<IQ", 8, 5) + b"".join(map(text, texts))
    (tmp_path / "m.gguf").write_bytes(file(pair("s", 9, items), pair("n", 4, struct.pack("<I", 7)), pairs=2))
    assert read_header(tmp_path / "m.gguf").metadata == {"s": texts, "n": 7}


def test_threads_that_read_one_header_at_once_read_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(file(NAME, pairs=1))
    read, together, times = _Reader.read, threading.Barrier(2), []

    def slow(reader: _Reader) -> GgufHeader:
        times.append(reader)
        return read(reader)

    def ask(_: int) -> GgufHeader:
        together.wait(10)
        return read_header(tmp_path / "m.gguf")

    monkeypatch.setattr(_Reader, "read", slow)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(ask, range(2))
    assert first is second
    assert len(times) == 1


@pytest.fixture
def whole(write_gguf: Write) -> bytes:
    """A small file that opens."""
    keys = {
        "context_length": 8, "embedding_length": 4, "block_count": 1, "feed_forward_length": 4,
        "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    return write_gguf("llama", keys, {"token_embd.weight": torch.zeros(259, 4)}).read_bytes()


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_damaged_file_either_opens_or_is_refused(data: st.DataObject, whole: bytes, tmp_path: Path) -> None:
    damaged = bytearray(whole)
    header = len(whole) - 259 * 16
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header - 8))
        what = data.draw(st.sampled_from(["flip", "giant", "cut", "drop"]))
        if what == "flip":
            damaged[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        elif what == "giant":
            number = data.draw(st.sampled_from([1 << 63, (1 << 64) - 1, 1 << 31, 1 << 40]))
            damaged[at : at + 8] = struct.pack("<Q", number)
        elif what == "cut":
            del damaged[max(at, 1) :]
        else:
            del damaged[at : at + data.draw(st.integers(1, 64))]
        if len(damaged) <= 32:
            break
        header = min(header, len(damaged))
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(damaged))
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            checkpoint.text(name)
        for name in checkpoint.headers:
            checkpoint.tensor(name)
    except EvenerError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 20_000_000


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(tail=st.binary(max_size=400))
def test_bytes_after_the_magic_number_are_refused_or_read(tail: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + tail)
    with pytest.raises(CheckpointError):
        open_checkpoint(path)
