"""The settings from which a front end is built, besides the engine's ``EngineInfo``."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.contracts.architecture import Architecture
from evener.contracts.generation.chat import Chat
from evener.engine.wire.installed import find_adapters
from evener.frontend.chat import open_chat
from evener.frontend.defaults import GenerationDefaults
from evener.frontend.frontend import Frontend
from evener.frontend.plugins import RequestPlugins
from evener.frontend.tokenizer import Tokenizer
from evener.loading.checkpoint import open_files

if TYPE_CHECKING:
    from evener.config import Config
    from evener.contracts.checkpoint import ModelFiles
    from evener.engine.facts.engine_info import EngineInfo
    from evener.engine.wire.messages import ToController


@dataclass(frozen=True, kw_only=True)
class FrontendSettings:
    """The front end's files, and defaults for requests.

    Attributes:
        model_dir: the model's folder or file; None: the engine's ``EngineInfo.model``.
        tokenizer_dir: folder or file with tokenizer and template; None: the model's.
        tokenizer: what ``Tokenizer.of`` made of these files; None: it is made together with the front end.
        seed: fixes the seeds of requests without one; None: random seeds.
        max_tokens: default maximum of new tokens; None: the rest of the context for chat, 16 for completions.
        stop_with_eos: whether an EOS token ends a request by default.
        plugins: names of the request plugins, in order; options: of packages, by package name.
        lora_modules: adapters to load, NAME=FOLDER.
    """

    model_dir: Path | None = None
    tokenizer_dir: Path | None = None
    tokenizer: Tokenizer | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_with_eos: bool = True
    plugins: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lora_modules: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Config) -> FrontendSettings:
        """The settings in ``config``."""
        return cls(
            model_dir=Path(config.model), tokenizer_dir=None if config.tokenizer is None else Path(config.tokenizer),
            seed=config.seed, max_tokens=config.request.max_new_tokens, stop_with_eos=config.infer.stop_with_eos,
            plugins=config.request.plugins, options=config.options, lora_modules=config.infer.lora_modules,
        )  # fmt: skip

    def build(self, info: EngineInfo, send: Callable[[ToController], None]) -> tuple[Frontend, Chat]:
        """The front end and the chat templates for an engine with this ``info``, which gets the adapters of
        ``lora_modules`` by ``send``. May take a second.

        Raises:
            CheckpointError: a tokenizer, template or generation file, or an adapter cannot be used.
        """
        model_dir = self.model_dir or Path(info.model)
        family = partial(_architecture, info.architecture)
        files = _text_files(model_dir, family)
        tokenizer_files = files if self.tokenizer_dir is None else _text_files(self.tokenizer_dir, family)
        tokenizer = self.tokenizer or Tokenizer.of(tokenizer_files)
        adapters = find_adapters(info.adapters or self.lora_modules)
        frontend = Frontend(
            max_model_len=info.max_model_len, vocab_size=info.vocab_size, tokenizer=tokenizer,
            defaults=GenerationDefaults.of(files, None if tokenizer is None else tokenizer.eos_id),
            default_max_tokens=self.max_tokens, stop_with_eos=self.stop_with_eos,
            plugins=RequestPlugins.load(self.plugins, model_dir, self.options),
            rng=None if self.seed is None else random.Random(self.seed),
            hidden_size=info.hidden_size, media_rows=info.media_rows, final_norm=info.final_norm,
            context_reason=info.setting("infer.max_seq_len").reason, pooling=info.pooling,
            adapters=adapters and adapters.front_end(info.adapters, (info.served_name,), send, self.lora_modules),
        )  # fmt: skip
        how = family().images(files.json("config.json")) if info.encoders else None
        return frontend, open_chat(tokenizer_files, tokenizer, how)


def _text_files(path: Path, family: Callable[[], type[Architecture]]) -> ModelFiles:
    """A model's text files; without ``tokenizer.json``, the files that the model's family makes from the others."""
    # Asked for by its name first: the text may be long, or made from something else.
    files, name = open_files(path), "tokenizer.json"
    return files if files.names(name) or files.text(name) is not None else family().text_files(files)


def _architecture(name: str | None) -> type[Architecture]:
    """An architecture's class, for its handling of text and images; no model is built. None: the base class."""
    from evener.plugins.discover import installed_catalog

    return Architecture if name is None else installed_catalog().lazy_imports("architecture")[name].load()
