"""Stands where vLLM's ``tests/utils.py`` would be, and for the few things of vLLM that tests of a server ask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .adapters import downloaded
from .package import Package
from .server import Launcher
from .vectors import stand_ins


def tests_utils(launcher: Launcher, root: Path, package: Package) -> ModuleType:
    """The module ``tests.utils``; ``root`` is where vLLM's source distribution was unpacked."""
    module = _Utilities("tests.utils", package)
    module.__dict__.update(
        RemoteOpenAIServer=launcher.server_class(),
        VLLM_PATH=root,
        ROCM_EXTRA_ARGS=[],
        ROCM_ENV_OVERRIDES={},
        multi_gpu_only=_needs("several GPUs"),
        multi_gpu_test=_needs("several GPUs"),
        large_gpu_test=_needs("a large GPU"),
        requires_fp8=pytest.mark.skip(reason="needs a GPU with FP8"),
        create_new_process_for_each_test=lambda *_: lambda test: test,
    )
    return module


def real_things(launcher: Launcher) -> dict[str, Any]:
    """What tests of a server ask of vLLM and cannot do without, by name: about what is served under a model's name."""
    return {
        "vllm.config.ModelConfig": type("ModelConfig", (_ModelConfig,), {"launcher": launcher}),
        "vllm.platforms.current_platform": _NoPlatform(),
        "vllm.tokenizers.get_tokenizer": lambda tokenizer_name, **_: AutoTokenizer.from_pretrained(tokenizer_name),
        "vllm.transformers_utils.repo_utils.hf_api": _NoHub,
        "vllm.version._prev_minor_version": lambda: "previous",
        **stand_ins(),
    }


class _Utilities(ModuleType):
    """Names that are not defined here come from the package that stands in for vLLM."""

    def __init__(self, name: str, package: Package) -> None:
        super().__init__(name)
        self._package = package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._package.thing(f"{self.__name__}.{name}")


def redirect_names(launcher: Launcher) -> None:
    """For every name of a model, transformers reads the tokenizer and the config of what is served under it."""
    for kind in (AutoTokenizer, AutoConfig):
        kind.from_pretrained = _reader(kind.from_pretrained, launcher)


class _ModelConfig:
    launcher: Launcher

    def __init__(self, model: str, **_: Any) -> None:
        self._config = self.launcher.config(model)

    def get_vocab_size(self) -> int:
        """The number of rows of the output layer."""
        return int(self._config["vocab_size"])

    def get_hidden_size(self) -> int:
        """The number of its columns."""
        return int(self._config["hidden_size"])


class _NoPlatform:
    """No ``is_…()`` holds."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        if not name.startswith("is_"):
            raise AttributeError(name)
        return lambda *_: False


class NoPictures:
    """Of vLLM's top conftest: a server of pictures, which are not in its source distribution."""

    def url_for(self, name: str) -> str:
        """A test that needs one is not run."""
        pytest.skip(f"needs the picture {name}, which is not in the source distribution")


class Reference:
    """Of vLLM's ``HfRunner``: the model in transformers, for embeddings of prompts."""

    launcher: Launcher

    def __init__(self, model: str, is_sentence_transformer: bool = False, **_: Any) -> None:
        if is_sentence_transformer:
            pytest.skip("needs the package sentence-transformers")
        self.tokenizer, config = AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(self.launcher.folder(model), config=config)

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is to be released."""

    def wrap_device(self, value: Any) -> Any:
        """The device is the CPU."""
        return value

    def get_prompt_embeddings(self, prompts: list[str]) -> list[Any]:
        """The embeddings [n, hidden] of the tokens of each prompt."""
        embed = self.model.get_input_embeddings()
        return [embed(self.tokenizer(each, return_tensors="pt").input_ids).squeeze(0).detach() for each in prompts]


class _NoHub:
    def snapshot_download(self, repo_id: str, **_: Any) -> str:
        """A folder's name: nothing is downloaded. Servers that need the files say so, or make an adapter there."""
        return downloaded(repo_id)


def _reader(read: Callable[..., Any], launcher: Launcher) -> Callable[..., Any]:
    return lambda name, *_, **__: read(launcher.folder(str(name)))


def _needs(what: str) -> Callable[..., pytest.MarkDecorator]:
    return lambda **_: pytest.mark.skip(reason=f"needs {what}")
