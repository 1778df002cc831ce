"""Request plugins: installed as any package, named by a key, run in order; a failure is one request's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evener.contracts.outputs import Delta, RequestOutput
from evener.contracts.request_plugin import RequestPlugin
from evener.errors import RequestError, RequestPluginError, UnknownNameError
from evener.frontend.plugins import RequestPlugins
from evener.llm import LLM
from evener.sampling_params import SamplingParams
from evener_conformance.distributions import write_distribution
from evener_conformance.fake_engine import FakeEngine
from evener_conformance.tiny_tokenizer import write_tiny_tokenizer


class Shout(RequestPlugin):
    """Asks politely, answers loudly, counts."""

    def prepare(self, model_dir: str, options: Any) -> None:
        self.model_dir, self.seen = model_dir, 0

    def preprocess(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["prompt"] == "forbidden":
            raise RequestError("not that word", "prompt")
        if request["prompt"] == "broken":
            raise ZeroDivisionError("oops")
        return {**request, "prompt": "please " + request["prompt"]}

    def postprocess_chunk(self, chunk: Delta) -> Delta:
        self.seen += 1
        if "explode" in chunk.text:
            raise ValueError("too loud")
        return replace(chunk, text=chunk.text.upper())

    def postprocess(self, response: RequestOutput) -> RequestOutput:
        response.outputs[0].text += "!"
        return response


@pytest.fixture
def llm_with(tmp_path: Path) -> Callable[..., LLM]:
    write_tiny_tokenizer(tmp_path)

    def make(*plugins: tuple[str, RequestPlugin]) -> LLM:
        llm = LLM.from_client(FakeEngine(), tmp_path)
        for _, plugin in plugins:
            plugin.prepare(str(tmp_path), {})
        llm._frontend.plugins = RequestPlugins(plugins)
        return llm

    return make


def test_a_plugin_sees_the_request_its_pieces_and_the_whole_response(llm_with: Callable[..., LLM]) -> None:
    with llm_with(("shout", Shout())) as llm:
        [output] = llm.generate("say hi", SamplingParams(max_tokens=32))
    assert output.prompt == "please say hi"
    assert output.outputs[0].text == output.outputs[0].text.upper() and output.outputs[0].text.endswith("!")


def test_a_plugin_may_refuse_a_request_and_its_own_failure_carries_its_name(llm_with: Callable[..., LLM]) -> None:
    with llm_with(("shout", Shout())) as llm:
        with pytest.raises(RequestError, match="not that word"):
            llm.generate("forbidden")
        with pytest.raises(RequestPluginError, match="'shout' failed in preprocess with ZeroDivisionError"):
            llm.generate("broken")
        assert llm.generate("fine", SamplingParams(max_tokens=4))[0].finished


def test_a_failure_on_a_piece_ends_that_request_with_the_plugins_name_and_no_other(
    llm_with: Callable[..., LLM],
) -> None:
    class Fragile(Shout):
        def postprocess_chunk(self, chunk: Delta) -> Delta:
            if chunk.request_id == "0":
                raise ValueError("too loud")
            return chunk

    with llm_with(("fragile", Fragile())) as llm:
        bad, good = llm.generate(["one", "two"], SamplingParams(max_tokens=8), raise_on_error=False)
    assert bad.error is not None and "'fragile' failed in postprocess_chunk" in bad.error
    assert good.error is None and good.finished


def test_plugins_are_found_by_name_among_installed_packages_and_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distribution(tmp_path, "evener-shout", {"evener.plugins": {"shout": "shout_descriptor:descriptor"}})
    (tmp_path / "shout_descriptor.py").write_text(
        "from evener.contracts.descriptor import Descriptor\n"
        "descriptor = Descriptor(name='shout', summary='s', contracts={'request_plugin': 1},"
        " request_plugins={'shout': 'shouting:Shout'})\n"
    )
    (tmp_path / "shouting.py").write_text(
        "from evener.contracts.request_plugin import RequestPlugin\n"
        "class Shout(RequestPlugin):\n"
        "    def prepare(self, model_dir, options):\n"
        "        self.model_dir = model_dir\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plugins = RequestPlugins.load(["shout"], Path("/models/m"), {})
    assert plugins and sys.modules["shouting"]
    with pytest.raises(UnknownNameError, match="unknown request plugin 'shuot'; did you mean 'shout'"):
        RequestPlugins.load(["shuot"], Path("/models/m"), {})


def test_without_plugins_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.plugins.discover.installed_catalog", lambda *_: pytest.fail("nobody asked"))
    assert not RequestPlugins.load([], Path("/models/m"), {})
