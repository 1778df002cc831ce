"""What a model makes of a whole text, in place of new tokens.

sentence-transformers saves such models as a list of modules in ``modules.json``: the language model, then its pooling
(``1_Pooling/config.json``), and whether vectors are normalized. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from evener.config.schema import InferConfig
from evener.contracts.checkpoint import Checkpoint, ModelFiles
from evener.errors import ArchitectureError, CheckpointError, RequestError

if TYPE_CHECKING:
    from evener.contracts.architecture import Architecture

Pooling = Literal["last", "mean", "cls"]
#: sentence-transformers' names of ways to pool that we have: in a list of flags, and by itself.
_MODES: Mapping[str, Pooling] = {
    "lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls",
}  # fmt: skip
_MODULES = {"Transformer", "Pooling", "Normalize"}
#: Models have three or four modules; a folder may be hostile.
_ModuleList = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=16)]


class PoolingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a model makes the vector of a text.

    Attributes:
        pooling: of which tokens: the last, the first, or the mean of all.
        normalize: whether it is divided by its length.
        sizes: numbers that a shorter vector may have (Kusupati et al. 2022); empty: any.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    sizes: list[int] = []

    @property
    def whole_prompt(self) -> bool:
        """Whether it takes more than the last token, so that a prompt is computed even if its state is cached."""
        return self.pooling != "last"


def check_kind(kind: str, settings: PoolingSettings | None) -> None:
    """Compare the ``kind`` of a request with what its model does.

    Raises:
        RequestError: it is not for this model.
    """
    if kind == "embed" and settings is None:
        raise RequestError(
            "this model generates text; to embed texts, start it with infer.task=embed", "model", "unsupported_task"
        )
    if kind != "embed" and settings is not None:
        message = "this model embeds texts (POST /v1/embeddings); to generate text, start it with infer.task=generate"
        raise RequestError(message, "model", "unsupported_task")


def choose_pooling(
    infer: InferConfig, files: Checkpoint, family: type[Architecture], known: Collection[str]
) -> PoolingSettings | None:
    """The settings of a model; None for one that generates text.

    Args:
        infer: with ``task`` and ``pooling``.
        files: of the model.
        family: its class.
        known: names of all registered classes. A class that is none of them, as ``XModel``, has no head to generate.

    Raises:
        ArchitectureError: the class cannot embed, or tokens of the model see later ones, which we do not compute.
        CheckpointError: it needs a module or a way to pool that is not there, or ``modules.json`` is broken.
    """
    modules = _modules(files) if infer.task != "generate" else []
    if infer.task == "generate" or (infer.task == "auto" and files.architecture in known and not modules):
        return None
    if not family.takes_head:
        raise ArchitectureError(f"{family.__name__} cannot embed texts; set infer.task=generate")
    if files.config.get("is_causal") is False or files.config.get("use_bidirectional_attention"):
        raise ArchitectureError(
            f"{files.where('config.json')} wants attention to later tokens too (is_causal, "
            "use_bidirectional_attention), which is not supported; give a model whose attention is causal"
        )
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if unknown := [kind for kind in kinds if kind not in _MODULES]:
        raise CheckpointError(
            f"{files.where('modules.json')} has the module {unknown[0][:80]!r}; only "
            f"{', '.join(sorted(_MODULES))} are supported"
        )
    pooling, sizes = infer.pooling, files.config.get("matryoshka_dimensions")
    if pooling == "auto":
        found = [_mode(files, m.get("path")) for m, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
        pooling = found[0] if found else "last"
    return PoolingSettings(
        pooling=pooling,  # type: ignore[arg-type]  # one of the key's choices
        normalize=not modules or "Normalize" in kinds,
        sizes=[n for n in sizes[:1024] if isinstance(n, int)] if isinstance(sizes, list) else [],
    )  # fmt: skip


def _modules(files: ModelFiles) -> list[Mapping[str, Any]]:
    name = "modules.json"
    if (text := files.text(name)) is None:
        return []
    try:
        modules: list[Mapping[str, Any]] = msgspec.json.decode(text, type=_ModuleList)
        return modules
    except (msgspec.MsgspecError, RecursionError) as error:
        where, why = files.where(name), str(error) or "it is nested too deeply"
        raise CheckpointError(f"{where} is no list of modules: {why}; fetch the file again") from error


def _mode(files: ModelFiles, folder: object) -> Pooling:
    if not isinstance(folder, str) or not re.fullmatch(r"\w[\w-]{0,63}", folder):
        raise CheckpointError(f"{files.where('modules.json')} names the folder {str(folder)[:80]!r}; fetch it again")
    config = files.json(f"{folder}/config.json")
    flags = [key.removeprefix("pooling_mode_") for key, on in config.items() if on is True and "pooling_mode_" in key]
    modes = [config["pooling_mode"]] if "pooling_mode" in config else flags
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _MODES:
        raise CheckpointError(
            f"{files.where(f'{folder}/config.json')} pools by {str(modes)[:80]}; supported is one of "
            f"{', '.join(_MODES)}: set infer.pooling to last, mean or cls"
        )
    return _MODES[modes[0]]
