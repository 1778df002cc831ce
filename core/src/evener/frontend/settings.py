"""What a front end is built from, beside the engine's own word."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.frontend.chat import Chat
from evener.frontend.defaults import GenerationDefaults
from evener.frontend.frontend import Frontend
from evener.frontend.images import Images
from evener.frontend.plugins import RequestPlugins
from evener.frontend.tokenizer import Tokenizer
from evener.loading.checkpoint import open_files

if TYPE_CHECKING:
    from evener.config import Config
    from evener.contracts.architecture import Architecture
    from evener.contracts.checkpoint import ModelFiles


@dataclass(frozen=True, kw_only=True)
class FrontendSettings:
    """Where the front end's files are, and what requests get that do not say.

    Attributes:
        model_dir: the model's folder or file; None: what ``Ready.info["model"]`` says.
        tokenizer_dir: folder or file with tokenizer and template; None: the model's.
        seed: fixes the seeds of requests that bring none; None draws them.
        max_tokens: new tokens of requests that do not say; None: chat takes the rest of the context, completions 16.
        stop_with_eos: whether an EOS token ends requests that do not say.
        plugins: names of the request plugins that run, in order; options: of packages, by package name.
    """

    model_dir: Path | None = None
    tokenizer_dir: Path | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_with_eos: bool = True
    plugins: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Config) -> FrontendSettings:
        """As the config says."""
        return cls(
            model_dir=Path(config.model),
            tokenizer_dir=None if config.tokenizer is None else Path(config.tokenizer),
            seed=config.seed,
            max_tokens=config.request.max_new_tokens,
            stop_with_eos=config.infer.stop_with_eos,
            plugins=config.request.plugins,
            options=config.options,
        )

    def build(self, info: dict[str, object]) -> tuple[Frontend, Chat]:
        """The front end and the chat template for an engine whose ``Ready.info`` is ``info``. May take a second.

        Raises:
            CheckpointError: a tokenizer, template or generation file cannot be used.
        """
        model_dir = self.model_dir or Path(str(info["model"]))
        family = partial(_architecture, info.get("architecture"))
        files = _texts(model_dir, family)
        tokenizer_files = files if self.tokenizer_dir is None else _texts(self.tokenizer_dir, family)
        tokenizer = Tokenizer.of(tokenizer_files)
        frontend = Frontend(
            max_model_len=int(info["max_model_len"]),  # type: ignore[call-overload]
            vocab_size=int(info["vocab_size"]),  # type: ignore[call-overload]
            tokenizer=tokenizer,
            defaults=GenerationDefaults.of(files, None if tokenizer is None else tokenizer.eos_id),
            default_max_tokens=self.max_tokens,
            stop_with_eos=self.stop_with_eos,
            plugins=RequestPlugins.load(self.plugins, model_dir, self.options),
            rng=None if self.seed is None else random.Random(self.seed),
            hidden_size=int(info.get("hidden_size", 0)),  # type: ignore[call-overload]
            media_rows=int(info.get("media_rows", 1)),  # type: ignore[call-overload]
        )
        how = family().images(files.json("config.json")) if info.get("encoders") else None
        images = None if how is None or tokenizer is None else partial(Images, how, tokenizer)
        return frontend, Chat.of(tokenizer_files, tokenizer, images)


def _texts(path: Path, family: Callable[[], type[Architecture]]) -> ModelFiles:
    """A model's text files; without ``tokenizer.json``, what its family's published code makes of those it has."""
    files = open_files(path)
    return files if files.text("tokenizer.json") is not None else family().text_files(files)


def _architecture(name: object) -> type[Architecture]:
    """An architecture's class, for what it says of text and images; its model is not made. None: what all inherit."""
    from evener.contracts.architecture import Architecture
    from evener.plugins.catalog import targets
    from evener.plugins.discover import discover

    return Architecture if name is None else targets(discover().packages, "architecture")[str(name)].load()
