"""What the files of a model say that it makes of a text: the modules of sentence-transformers, or a class that has a
head for one label. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.contracts.checkpoint import Checkpoint, ModelFiles
from evener.contracts.pooling import Pooling, PoolingAnswer, PoolingRequest, PoolingSettings
from evener.errors import ArchitectureError, CheckpointError
from evener_models.pooling.heads import EncoderHead, FinalNorm, label_head
from evener_models.pooling.modules import module_file, read_modules
from evener_models.pooling.pairs import pair_separator

#: sentence-transformers' names of ways to pool that we have: in a list of flags, and by itself.
_MODES: Mapping[str, Pooling] = {
    "lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls",
}  # fmt: skip
#: Modules of the models for each task.
_MODULES = {"embed": {"Transformer", "Pooling", "Normalize"}, "score": {"Transformer", "LogitScore"}}
_CLASSIFIER = "ForSequenceClassification"


def read(request: PoolingRequest) -> PoolingAnswer | None:
    """How a model embeds or scores; None for one that generates text.

    Raises:
        ArchitectureError: tokens of the model see later ones, which is not computed.
        CheckpointError: it needs a module or a way to pool that is not there, or a file is broken.
    """
    files, task = request.checkpoint, request.task
    modules = read_modules(files)
    if task == "auto" and (files.architecture.endswith(_CLASSIFIER) or "LogitScore" in modules):
        task = "score"
    elif task == "auto" and not modules and request.generates:
        return None
    elif task == "auto":
        task = "embed"
    encoder = request.longest is not None
    if not encoder and (files.config.get("is_causal") is False or files.config.get("use_bidirectional_attention")):
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
        settings = _score(files, modules, encoder)
        if encoder:
            return PoolingAnswer(settings, EncoderHead(label=True, separator=pair_separator(files)))
        return PoolingAnswer(settings, None if settings.tokens else label_head)
    pooling, sizes = request.pooling, files.config.get("matryoshka_dimensions")
    if pooling == "auto":
        pooling = _mode(files, modules["Pooling"]) if "Pooling" in modules else "mean" if encoder else "last"
    settings = PoolingSettings(
        pooling=pooling,  # type: ignore[arg-type]  # one of the key's choices
        normalize=not modules or "Normalize" in modules,
        sizes=[n for n in sizes[:1024] if isinstance(n, int)] if isinstance(sizes, list) else [],
    )
    return PoolingAnswer(settings, EncoderHead() if encoder else FinalNorm)


def _mode(files: ModelFiles, folder: object) -> Pooling:
    config = files.json(name := module_file(files, folder))
    flags = [key.removeprefix("pooling_mode_") for key, on in config.items() if on is True and "pooling_mode_" in key]
    modes = [config["pooling_mode"]] if "pooling_mode" in config else flags
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _MODES:
        raise CheckpointError(
            f"{files.where(name)} pools by {str(modes)[:80]}; supported is one of {', '.join(_MODES)}: "
            "set infer.pooling to last, mean or cls"
        )
    return _MODES[modes[0]]


def _score(files: Checkpoint, modules: Mapping[str, object], encoder: bool) -> PoolingSettings:
    saved = files.config.get("sentence_transformers")
    given = saved if isinstance(saved, dict) else files.json("config_sentence_transformers.json")
    old = files.config.get("sbert_ce_default_activation_function")
    name = str(given.get("activation_fn") or old or "Sigmoid").rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise CheckpointError(f"{files.path} applies {name[:80]!r} to scores; only Sigmoid and Identity are supported")
    if files.architecture.endswith(_CLASSIFIER):
        names = files.config.get("id2label")
        labels = files.config.get("num_labels", len(names) if isinstance(names, dict) else 2)
        if labels != 1:
            where = files.where("config.json")
            raise CheckpointError(f"{where} has {str(labels)[:20]} labels; scores need a model with one")
        if encoder:
            pooling = files.config.get("classifier_pooling", "cls")
            if pooling not in ("cls", "mean"):
                where = files.where("config.json")
                raise CheckpointError(f"{where} has classifier_pooling {str(pooling)[:80]!r}, which is not cls or mean")
            return PoolingSettings(task="score", pooling=pooling, sigmoid=name == "Sigmoid", pairs=True)
        return PoolingSettings(task="score", sigmoid=name == "Sigmoid")
    if encoder:
        raise CheckpointError(f"{files.path} has no head for a label; scores need a model …ForSequenceClassification")
    return PoolingSettings(task="score", sigmoid=name == "Sigmoid", tokens=_yes_and_no(files, modules))


def _yes_and_no(files: Checkpoint, modules: Mapping[str, object]) -> list[int]:
    if "LogitScore" in modules:
        config = files.json(name := module_file(files, modules["LogitScore"]))
        found: list[Any] = [config.get(key) for key in ("true_token_id", "false_token_id")]
        found, where = found[:1] if found[1] is None else found, files.where(name)
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
    return tokens
