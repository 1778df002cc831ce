"""Tokenizers and chat templates are read by installed packages, which are named where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evener.contracts.descriptor import Descriptor
from evener.contracts.generation.chat import Chat, ChatSource
from evener.errors import CheckpointError, TemplateError
from evener.frontend import chat, tokenizer
from evener.loading.checkpoint import open_files
from evener.plugins.catalog import Catalog, Package

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_tokenizer_without_a_package_that_reads_it_is_an_error_that_names_one(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tokenizer, "installed_catalog", Catalog)
    with pytest.raises(CheckpointError, match="pip install evener-formats"):
        tokenizer.Tokenizer.of(open_files(tiny_dir))
    assert tokenizer.Tokenizer.of(open_files(tmp_path)) is None


def test_a_chat_without_a_package_that_writes_it_is_an_error_that_names_one(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "installed_catalog", Catalog)
    unread = chat.open_chat(open_files(tiny_dir))
    unread.templates = {"default": "{{ messages }}"}  # an operator's own
    with pytest.raises(TemplateError, match="pip install evener-formats"):
        unread.prompt(MESSAGES)


class Fixed(Chat):
    """Of a package that knows some models, whatever their files say."""

    def __init__(self, templates: dict[str, str]) -> None:
        self.templates = templates

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return f"{self.template(False)} {len(messages)}"

    prompt = render


def knows_nothing(source: ChatSource) -> None:
    return None


def finds_none(source: ChatSource) -> Chat:
    return Fixed({})


def knows(source: ChatSource) -> Chat:
    return Fixed({"default": "mine"})


def installed(*names: str) -> Catalog:
    readers = {name: f"{__name__}:{name}" for name in names}
    descriptor = Descriptor(name="one", summary="", contracts={"generation": 1}, chat_readers=readers)
    package = Package(group="evener.plugins", name="one", distribution="one", version="1", descriptor=descriptor)
    return Catalog((package,))


def test_a_package_that_knows_the_model_goes_before_one_that_finds_no_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "installed_catalog", lambda: installed("knows_nothing", "finds_none", "knows"))
    assert chat.open_chat(open_files(tmp_path)).prompt(MESSAGES) == "mine 1"
    monkeypatch.setattr(chat, "installed_catalog", lambda: installed("knows_nothing", "finds_none"))
    found = chat.open_chat(open_files(tmp_path))
    assert not found.available
    found.templates = {"default": "the operator's"}
    assert found.prompt(MESSAGES) == "the operator's 1"
