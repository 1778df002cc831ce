"""What a model makes of a whole text, in place of new tokens: a vector, or a score.

sentence-transformers saves such models as a list of modules in ``modules.json``: the language model, then its pooling
(``1_Pooling/config.json``) and whether vectors are normalized, or the tokens whose logits are the score
(``1_LogitScore/config.json``). Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from evener.config.schema import InferConfig
from evener.contracts.checkpoint import Checkpoint, ModelFiles
from evener.errors import ArchitectureError, CheckpointError, ConfigError, RequestError

if TYPE_CHECKING:
    from evener.contracts.architecture import Architecture

Pooling = Literal["last", "mean", "cls"]
#: sentence-transformers' names of ways to pool that we have: in a list of flags, and by itself.
_MODES: Mapping[str, Pooling] = {
    "lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls",
}  # fmt: skip
#: Modules of the models for each task.
_MODULES = {"embed": {"Transformer", "Pooling", "Normalize"}, "score": {"Transformer", "LogitScore"}}
#: Models have three or four modules; a folder may be hostile.
_ModuleList = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=16)]
_CLASSIFIER = "ForSequenceClassification"
#: What a model does, for messages.
_DOES = {"generate": "generates text", "embed": "embeds texts (/v1/embeddings)", "score": "scores texts (/v1/rerank)"}


class PoolingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a model makes the vector or the score of a text.

    Attributes:
        task: "embed" or "score".
        pooling: of which tokens: the last, the first, or the mean of all.
        normalize: whether a vector is divided by its length.
        sizes: numbers that a shorter vector may have (Kusupati et al. 2022); empty: any.
        tokens: for a score of logits, the id of the token for yes, and that for no, if there is one. Empty: the score
            is of a head for one label.
        sigmoid: whether a score is the probability, and not the log-odds.
    """

    task: str = "embed"
    pooling: Pooling = "last"
    normalize: bool = True
    sizes: list[int] = []
    tokens: list[int] = []
    sigmoid: bool = True

    @property
    def whole_prompt(self) -> bool:
        """Whether it takes more than the last token, so that a prompt is computed even if its state is cached."""
        return self.pooling != "last"


def check_task(wanted: str, settings: PoolingSettings | None) -> None:
    """Raises:
    RequestError: the model does not do what is ``wanted``: "generate", "embed" or "score".
    """
    if wanted != (task := "generate" if settings is None else settings.task):
        message = f"this model {_DOES[task]}; to have one that {_DOES[wanted]}, start it with infer.task={wanted}"
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
        ArchitectureError: the class cannot do it, or tokens of the model see later ones, which we do not compute.
        CheckpointError: it needs a module or a way to pool that is not there, or a file is broken.
        ConfigError: ``infer.pooling`` is set for a model that does not embed.
    """
    modules: Mapping[str, object] = {} if infer.task == "generate" else _modules(files)
    task = infer.task
    if task == "auto" and (files.architecture.endswith(_CLASSIFIER) or "LogitScore" in modules):
        task = "score"
    elif task == "auto":
        task = "embed" if modules or files.architecture not in known else "generate"
    if task != "embed" and infer.pooling != "auto":
        raise ConfigError(f"infer.pooling={infer.pooling} is for a model that embeds: set infer.task=embed")
    if task == "generate":
        return None
    if not family.takes_head:
        raise ArchitectureError(f"{family.__name__} can only generate text; set infer.task=generate")
    if files.config.get("is_causal") is False or files.config.get("use_bidirectional_attention"):
        raise ArchitectureError(
            f"{files.where('config.json')} wants attention to later tokens too (is_causal, "
            "use_bidirectional_attention), which is not supported; give a model whose attention is causal"
        )
    if unknown := modules.keys() - _MODULES[task]:
        raise CheckpointError(
            f"{files.where('modules.json')} has the module {min(unknown)[:80]!r}; with infer.task={task} only "
            f"{', '.join(sorted(_MODULES[task]))} are supported"
        )
    if task == "score":
        return _scores(files, modules)
    pooling, sizes = infer.pooling, files.config.get("matryoshka_dimensions")
    if pooling == "auto":
        pooling = _mode(files, modules["Pooling"]) if "Pooling" in modules else "last"
    return PoolingSettings(
        pooling=pooling,  # type: ignore[arg-type]  # one of the key's choices
        normalize=not modules or "Normalize" in modules,
        sizes=[n for n in sizes[:1024] if isinstance(n, int)] if isinstance(sizes, list) else [],
    )  # fmt: skip


def _modules(files: ModelFiles) -> Mapping[str, object]:
    """The folder of each module in ``modules.json``, by the module's kind; empty without that file."""
    name = "modules.json"
    if (text := files.text(name)) is None:
        return {}
    try:
        modules: list[Mapping[str, Any]] = msgspec.json.decode(text, type=_ModuleList)
    except (msgspec.MsgspecError, RecursionError) as error:
        where, why = files.where(name), str(error) or "it is nested too deeply"
        raise CheckpointError(f"{where} is no list of modules: {why}; fetch the file again") from error
    return {str(module.get("type", "")).rpartition(".")[2]: module.get("path") for module in modules}


def _module_file(files: ModelFiles, folder: object) -> str:
    if not isinstance(folder, str) or not re.fullmatch(r"\w[\w-]{0,63}", folder):
        raise CheckpointError(f"{files.where('modules.json')} names the folder {str(folder)[:80]!r}; fetch it again")
    return f"{folder}/config.json"


def _mode(files: ModelFiles, folder: object) -> Pooling:
    config = files.json(name := _module_file(files, folder))
    flags = [key.removeprefix("pooling_mode_") for key, on in config.items() if on is True and "pooling_mode_" in key]
    modes = [config["pooling_mode"]] if "pooling_mode" in config else flags
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _MODES:
        raise CheckpointError(
            f"{files.where(name)} pools by {str(modes)[:80]}; supported is one of {', '.join(_MODES)}: "
            "set infer.pooling to last, mean or cls"
        )
    return _MODES[modes[0]]


def _scores(files: Checkpoint, modules: Mapping[str, object]) -> PoolingSettings:
    saved = files.config.get("sentence_transformers")
    given = saved if isinstance(saved, dict) else files.json("config_sentence_transformers.json")
    name = str(given.get("activation_fn") or "Sigmoid").rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise CheckpointError(f"{files.path} applies {name[:80]!r} to scores; only Sigmoid and Identity are supported")
    if files.architecture.endswith(_CLASSIFIER):
        names = files.config.get("id2label")
        labels = files.config.get("num_labels", len(names) if isinstance(names, dict) else 2)
        if labels != 1:
            where = files.where("config.json")
            raise CheckpointError(f"{where} has {str(labels)[:20]} labels; scores need a model with one")
        return PoolingSettings(task="score", sigmoid=name == "Sigmoid")
    if "LogitScore" in modules:
        config = files.json(name_of := _module_file(files, modules["LogitScore"]))
        found: list[Any] = [config.get(key) for key in ("true_token_id", "false_token_id")]
        found, where = found[:1] if found[1] is None else found, files.where(name_of)
    else:
        where, model = files.where("tokenizer.json"), files.json("tokenizer.json").get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        found = [vocabulary.get(word) if isinstance(vocabulary, dict) else None for word in ("yes", "no")]
    size = files.config.get("vocab_size")
    tokens = [token for token in found if type(token) is int and isinstance(size, int) and 0 <= token < size]
    if len(tokens) < len(found):
        raise CheckpointError(
            f"{where} has no two tokens of the model for yes and no, whose logits would be the score; give a reranker"
        )
    return PoolingSettings(task="score", sigmoid=name == "Sigmoid", tokens=tokens)
