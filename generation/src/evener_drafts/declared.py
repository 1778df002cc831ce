"""The draft model before weights are read: which models can be one, and its layers."""

from __future__ import annotations

from dataclasses import replace

from evener.config.resolve import ResolvedConfig
from evener.contracts.architecture import Architecture
from evener.contracts.conversion.views import CheckpointView
from evener.contracts.device import Device
from evener.contracts.tokenizer import ReadTokenizer
from evener.distributed.world import RankGroups
from evener.engine.quantized.state import choose_state
from evener.engine.sampling.sampler import Sampler
from evener.engine.worker.assembly import declare_model, find_architecture, view_model
from evener.errors import ConfigError
from evener.layers.builder import Builder
from evener.loading.checkpoint import open_checkpoint, open_files
from evener.plugins.discover import installed_catalog
from evener.plugins.load import LoadedPackages
from evener_drafts.draft import DeclaredDraft
from evener_drafts.eagle_head import declare_eagle, is_eagle


def _check_tokens(own: str, folder: str) -> None:
    """Check that a draft model has the model's tokens. Models without a tokenizer are not compared.

    Raises:
        ConfigError: a token differs.
    """
    found, drafts = _tokenizer(own), _tokenizer(folder)
    if found is None or drafts is None:
        return
    ours, theirs = found.vocabulary, drafts.vocabulary
    for token in range(min(ours.size(), theirs.size())):
        if ours.token(token) != theirs.token(token):
            raise ConfigError(
                f"infer.draft_model={folder} has another tokenizer than the model: token {token} is "
                f"{theirs.token(token)!r}, and {ours.token(token)!r} in {own}; take a smaller model of the same "
                "family, or leave it out"
            )


def _tokenizer(path: str) -> ReadTokenizer | None:
    return next(installed_catalog().answers("tokenizer reader", open_files(path)), None)


def declare_draft(
    config: ResolvedConfig, loaded: LoadedPackages, device: Device, ranks: RankGroups, model: Architecture,
    build: Builder,
) -> DeclaredDraft:  # fmt: skip
    """Declare the draft model.

    Args:
        model: the model that it drafts for, declared to ``build``.

    Raises:
        EvenerError: it cannot be opened, or cannot propose tokens for the model.
    """
    del build
    folder = config.config.infer.draft_model
    if folder is None:
        raise ConfigError("infer.drafter=model needs a draft model: set infer.draft_model=FOLDER instead")
    _check_tokens(config.config.tokenizer or config.config.model, folder)
    checkpoint, said = open_checkpoint(folder), f"infer.draft_model={folder}"
    if is_eagle(checkpoint.config):
        return declare_eagle(config, loaded, device, ranks, model, checkpoint)
    stored = view_model(config, loaded, ranks, checkpoint, find_architecture(loaded, checkpoint), draft=True)
    # What the run says of layers, and of stored keys and values, is for the model; scales are those of one model.
    state = replace(config.config.infer, kv_dtype="auto", kv_scales=None, layers=())
    own, draft = declare_model(replace(config, config=replace(config.config, infer=state)), ranks, stored)
    if draft.vocab_size > model.vocab_size:
        raise ConfigError(f"{said} has {draft.vocab_size} token ids, and the model {model.vocab_size}; take a draft "
                          "model with the model's own tokenizer, or leave it out")  # fmt: skip
    if draft.max_positions < config.max_seq_len:
        raise ConfigError(f"{said} has {draft.max_positions} positions, and infer.max_seq_len is {config.max_seq_len}; "
                          f"set infer.max_seq_len={draft.max_positions}, or leave the draft model out")  # fmt: skip
    # It computes its own drafts before they are checked, and recurrent state cannot go back. A chunk's blocks are freed
    # with its last token, which the draft model may compute a step later.
    for slot in own.slots:
        if slot.spec.per == "request" or slot.spec.kind == "chunk":
            raise ConfigError(f"{said} needs state that can go back a few tokens, and a layer of the draft model has "
                              f"state of kind {slot.spec.kind!r}; take another one, or leave it out")  # fmt: skip
    if stored.headers and isinstance(stored.checkpoint, CheckpointView):
        stored.checkpoint.reslice(own.weights)
    found = DeclaredDraft(stored, own, draft, Sampler(own, draft.vocab_size))
    choose_state([own], state, stored.checkpoint, stored.headers, device, loaded)
    for site in own.sites:
        site.path = f"draft model: {site.path}"  # in the manifest
    return found
