"""A GGUF file as the result: what it says and what each of its tensors is made from. Before a byte is written under its
name, the file without its numbers is opened by the reader of such files, and must be the same model."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from evener.contracts.checkpoint import Headers, ModelFiles
from evener.contracts.quant import BLOCKS
from evener.distributed.world import World
from evener.errors import CheckpointError, ConfigError
from evener.loading.match import IGNORABLE_BUFFERS
from evener_convert.gguf_check import check_same_model, check_same_tokenizer, check_usable_tokenizer
from evener_convert.pieces import Piece, Read, Stored
from evener_convert.source import Source, declare, description
from evener_convert.writer import WeightFile
from evener_formats.gguf.checkpoint import GgufCheckpoint
from evener_formats.gguf.families import Llama
from evener_formats.gguf.file_tensors import FileTensor, file_tensors
from evener_formats.gguf.written import (
    ALIGNMENT,
    DIVISORS,
    divisors,
    family_of,
    general_keys,
    header_bytes,
    model_keys,
    write_draft,
)
from evener_formats.tokenizers.gguf_tokenizer_keys import tokenizer_keys


def gguf_file(source: Source, name: str) -> WeightFile:
    """The file ``name`` with the model of ``source``.

    Raises:
        EvenerError: a GGUF file cannot hold this model, these formats, or this tokenizer.
    """
    config, infer = source.checkpoint.config, source.config.infer
    if infer.tp_size * infer.pp_size > 1:
        raise ConfigError(f"{name}: a GGUF file is not split for ranks; leave infer.tp_size and infer.pp_size out")
    kind, family = family_of(source.checkpoint.architecture)
    settings = config.get("quantization_config")
    method = settings.get("quant_method", "gguf") if isinstance(settings, Mapping) else "gguf"
    if method not in ("gguf", "mxfp4"):
        raise ConfigError(
            f"{source.checkpoint.path} would be stored as {str(method)[:80]}, which a GGUF file cannot hold; use an "
            "unquantized model, and leave quant out or take one of quant=q8_0, q6_k, q5_k_m, q4_k_m, q4_k"
        )
    headers = _element_headers(source)
    made = file_tensors(family, config, headers)
    factors = torch.tensor(divisors(config), dtype=torch.float32)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {DIVISORS: ("float32", tuple(factors.shape))} if len(
        factors) else {}  # fmt: skip
    tensors |= {stored: (each.dtype, each.shape) for stored, each in made.items()}
    said = description(source)
    origin = {key: value for key, value in said.items() if key != "source"}
    files, path = _text_files(source), Path(source.config.model).expanduser().resolve()
    check_usable_tokenizer(files)
    keys = {
        **general_keys(path.name if path.is_dir() else path.stem, source.config.quant, tensors, origin),
        **model_keys(kind, family, config), **tokenizer_keys(files, headers["model.embed_tokens.weight"][1][0]),
    }  # fmt: skip
    header = header_bytes(kind, keys, tensors)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / name
        write_draft(draft, header, tensors, factors.numpy().tobytes())
        written = GgufCheckpoint(draft)
        _check(source, {name: each for one in made.values() for name, each in one.read.items()}, files, written)
    pieces = [_divisors_piece(factors)] if len(factors) else []
    stored_as = {_element_name(each): each for each in source.checkpoint.headers}
    pieces += [_piece(written.family, stored, each, stored_as) for stored, each in made.items()]
    return WeightFile(name, header, pieces, ALIGNMENT)


def _check(source: Source, wanted: Headers, files: ModelFiles, written: GgufCheckpoint) -> None:
    """Compare the file ``written``, which has no numbers yet, with the source, of which its reader should give the
    tensors ``wanted``."""
    if dict(written.headers) != wanted:
        away = sorted(set(wanted.items()) ^ set(written.headers.items()))
        raise CheckpointError(f"the GGUF file would have other tensors: {away[:4]}; this is a mistake of evener's")
    check_same_model(source, written.config)
    check_same_tokenizer(files, written, wanted["model.embed_tokens.weight"][1][0])


def _element_headers(source: Source) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What the source stores and the model reads, by the names of a folder that knows no blocks: blocks that are bytes
    (``<name>.q4_k``) get the name and the shape of the matrix. A head that is tied to an embedding is left out.

    Raises:
        CheckpointError: such a head differs from the embedding.
    """
    checkpoint, found = source.checkpoint, {}
    build = declare(source, World())
    for name, (dtype, shape) in checkpoint.headers.items():
        if any(re.fullmatch(pattern, name) for pattern in (*IGNORABLE_BUFFERS, *build.ignored)):
            continue
        twin = build.ties.get(name)
        if twin is not None and twin in checkpoint.headers:
            if not torch.equal(checkpoint.tensor(name), checkpoint.tensor(twin)):
                raise CheckpointError(
                    f"{checkpoint.path} stores both {name} and {twin}, and they differ, but its config.json says that "
                    'they are one; set "tie_word_embeddings": false in it'
                )
            continue
        element = _element_name(name)
        if element != name:
            dtype = name.rpartition(".")[2]
            elements, nbytes = BLOCKS[dtype]
            shape = (*shape[:-1], shape[-1] // nbytes * elements)
        found[element] = (dtype, shape)
    return found


def _element_name(name: str) -> str:
    stem, _, form = name.rpartition(".")
    return stem if form in BLOCKS else name


def _text_files(source: Source) -> ModelFiles:
    """The model's text files, with a tokenizer that its family makes from other files."""
    files = source.checkpoint
    return files if files.text("tokenizer.json") is not None else source.family.text_files(files)


def _piece(family: Llama, stored: str, planned: FileTensor, stored_as: Mapping[str, str]) -> Piece:
    def make(read: Read) -> Mapping[str, torch.Tensor]:
        return {stored: planned.make(family, [read(stored_as[name]) for name in planned.names])}

    return Piece(make, {stored: Stored(*planned.bytes_shape)})


def _divisors_piece(factors: torch.Tensor) -> Piece:
    return Piece(lambda _: {DIVISORS: factors}, {DIVISORS: Stored("float32", tuple(factors.shape))})
