"""Models by their id on a hub: fetched once through ``huggingface_hub``, then opened as folders."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

from evener.config.schema import Config
from evener.errors import CheckpointError

_ID = re.compile(r"(?P<id>[A-Za-z0-9_][\w.-]*/[\w.-]+)(?:/(?P<file>[^\\]+\.\w+))?")
#: What a model folder needs beside weights; files in sub-folders are of other programs, but for chat templates.
_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_OTHERS = tuple(f"*/{ending}" for ending in ("*.json", "*.txt", "*.model", "*.safetensors", "*.bin"))
_SAFETENSORS, _BIN = "*.safetensors", "pytorch_model*.bin"


def with_local_model(config: Config) -> Config:
    """``config`` with a model that lies here: an id such as ``org/name`` (or ``org/name/file.gguf``) that is no path is
    fetched, and stays the served name.

    Raises:
        CheckpointError: the hub does not have it, or not for us; it cannot be reached; it is not here and
            ``hub.offline`` is set.
    """
    named = _ID.fullmatch(config.model)
    if named is None or Path(config.model).expanduser().exists():
        return config
    folder = _fetch(named["id"], named["file"], config)
    served = config.serve.served_model_name or config.model
    return replace(
        config, model=str(folder / (named["file"] or "")), serve=replace(config.serve, served_model_name=served)
    )


def _fetch(model: str, file: str | None, config: Config) -> Path:
    asked = f"{config.model} is no path here, so it is looked for on the hub"
    try:
        import huggingface_hub as library
        from huggingface_hub import constants, errors
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise CheckpointError(f"{asked}, which needs huggingface_hub: pip install 'evener[hub]'") from error
    if not sys.stderr.isatty():
        disable_progress_bars()
    offline = config.hub.offline or constants.is_offline_mode()
    revision = config.hub.revision
    endpoint = os.environ.get("HF_ENDPOINT") or None

    def snapshot(*patterns: str) -> Path:
        return Path(
            library.snapshot_download(
                model, revision=revision, cache_dir=config.hub.cache, endpoint=endpoint, local_files_only=offline,
                allow_patterns=list(patterns), ignore_patterns=[*_OTHERS, "consolidated*"],
            )
        )  # fmt: skip

    at = f" at revision {revision!r}" if revision else ""
    try:
        if file is not None:
            return _with_file(snapshot(file), file, asked)
        if config.load == "dummy":
            return snapshot(*_TEXTS)
        if offline:
            return snapshot(*_TEXTS, _SAFETENSORS)
        info = library.HfApi(endpoint=endpoint).model_info(model, revision=revision)
        return snapshot(*_TEXTS, _weights([item.rfilename for item in info.siblings or ()], model))
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{asked}, where {model} is given to those who accept its terms: accept them on its page, then set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{asked}, which has no {model}{at}; set hub.revision to a branch, tag or commit"
        ) from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code not in (401, 403, 404):
            raise CheckpointError(f"{asked}, and that failed: {_short(error)}; try again later") from error
        raise CheckpointError(
            f"{asked}, which has no {model}, or not for everybody: check the name, or set HF_TOKEN; for a folder of "
            "this machine check the path"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        if offline:
            raise CheckpointError(
                f"{asked}, and it has not been fetched{at} yet, and being offline is asked for (hub.offline or "
                "HF_HUB_OFFLINE); unset that once, or give a folder"
            ) from error
        raise CheckpointError(
            f"{asked}, which cannot be reached: {_short(error)}; set HF_ENDPOINT for another hub"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # the library lets through what its HTTP client raises
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
        raise CheckpointError(f"{model} holds single files ({shown}); name one, as in {model}/{single[0]}")
    raise CheckpointError(f"{model} holds no weights in safetensors or pytorch_model.bin; is it a language model?")


def _with_file(folder: Path, file: str, asked: str) -> Path:
    if not (folder / file).is_file():
        raise CheckpointError(f"{asked}, and the model there has no file {file!r}")
    return folder


def _short(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


