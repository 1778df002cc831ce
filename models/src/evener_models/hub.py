"""Models by their id on a hub: downloaded once through ``huggingface_hub``, then opened as folders. Torch-free."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.contracts.descriptor import Descriptor, Option
from evener.errors import CheckpointError

_ID = re.compile(r"(?P<id>[A-Za-z0-9_][\w.-]*/[\w.-]+)(?:/(?P<file>[^\\]+\.\w+))?")
#: What a model folder needs beside weights. Of files in sub-folders, only chat templates are used.
_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_OTHERS = tuple(f"*/{ending}" for ending in ("*.json", "*.txt", "*.model", "*.safetensors", "*.bin"))
_SAFETENSORS, _BIN = "*.safetensors", "pytorch_model*.bin"


descriptor = Descriptor(
    name="hub",
    summary="Models by their id on a hub, through huggingface_hub. No option holds the token: set HF_TOKEN.",
    contracts={"descriptor": 1, "checkpoint": 1},
    options={
        "revision": Option(type=str, default=None, help="Branch, tag or commit of a hub's model; none: its main one."),
        "cache": Option(type=str, default=None, help="Folder for downloaded models; none: the hub library's cache."),
        "offline": Option(
            type=bool, default=False, help="Use only models downloaded before; HF_HUB_OFFLINE=1 does the same."
        ),
    },
    model_sources={"hub": "evener_models.hub:fetch"},
)


def fetch(name: str, weights: bool, options: Mapping[str, Any]) -> Path | None:
    """The folder of ``org/name``, or the file of ``org/name/file.gguf``; None if ``name`` cannot be an id.

    Args:
        name: the id.
        weights: whether to download weights too.
        options: the options of this package: ``revision``, ``cache``, ``offline``.

    Raises:
        CheckpointError: the hub does not have the model, refuses access or cannot be reached; or ``hub.offline`` is
            set and the model was not downloaded before.
    """
    named = _ID.fullmatch(name)
    if named is None:
        return None
    model, file = named["id"], named["file"]
    asked = f"{name} is not a path on this machine, so it is looked for on the hub"
    try:
        import huggingface_hub as library
        from huggingface_hub import constants, errors
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise CheckpointError(f"{asked}, which needs huggingface_hub: pip install huggingface_hub") from error
    if not sys.stderr.isatty():
        disable_progress_bars()
    offline = options.get("offline", False) or constants.is_offline_mode()
    revision = options.get("revision")
    endpoint = os.environ.get("HF_ENDPOINT") or None

    def snapshot(*patterns: str) -> Path:
        return Path(
            library.snapshot_download(
                model, revision=revision, cache_dir=options.get("cache"), endpoint=endpoint, local_files_only=offline,
                allow_patterns=list(patterns), ignore_patterns=[*_OTHERS, "consolidated*"],
            )
        )  # fmt: skip

    at = f" at revision {revision!r}" if revision else ""
    try:
        if file is not None:
            return _with_file(snapshot(file), file, asked)
        if not weights:
            return snapshot(*_TEXTS)
        if offline:
            return snapshot(*_TEXTS, _SAFETENSORS)
        info = library.HfApi(endpoint=endpoint).model_info(model, revision=revision)
        return snapshot(*_TEXTS, _weights([item.rfilename for item in info.siblings or ()], model))
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{asked}, where {model} is only for users who accept its terms: accept them on its page, then set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{asked}, which has no {model}{at}; set hub.revision to a branch, tag or commit"
        ) from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code not in (401, 403, 404):
            raise CheckpointError(f"{asked}, and that failed: {_short(error)}; try again later") from error
        raise CheckpointError(
            f"{asked}, where {model} does not exist or is private: check the name, or set HF_TOKEN; for a folder on "
            "this machine, check the path"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        if offline:
            raise CheckpointError(
                f"{asked}, but it has not been downloaded{at} yet, and hub.offline or HF_HUB_OFFLINE is set; unset "
                "it once, or give a folder"
            ) from error
        raise CheckpointError(
            f"{asked}, which cannot be reached: {_short(error)}; set HF_ENDPOINT for another hub"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # the library does not wrap what its HTTP client raises
        raise CheckpointError(f"{asked}, and that failed with {type(error).__name__}: {_short(error)}") from error


def _weights(names: list[str], model: str) -> str:
    """The pattern of the weight files to fetch: safetensors if there are any."""
    if any(name.endswith(".safetensors") for name in names if "/" not in name):
        return _SAFETENSORS
    if any(re.fullmatch(r"pytorch_model.*\.bin", name) for name in names):
        return _BIN
    single = sorted(name for name in names if name.endswith(".gguf"))
    if single:
        shown = ", ".join(single[:10])
        raise CheckpointError(f"{model} has one model per file ({shown}); name one, as in {model}/{single[0]}")
    raise CheckpointError(f"{model} has no weights in safetensors or pytorch_model.bin; is it a language model?")


def _with_file(folder: Path, file: str, asked: str) -> Path:
    if not (folder / file).is_file():
        raise CheckpointError(f"{asked}, but the model there has no file {file!r}")
    return folder / file


def _short(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
