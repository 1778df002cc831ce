"""``ksana_plugin.py`` in a model's folder: when it runs, what it gets, and what it may change."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.config import from_overrides
from evener.engine.wire.messages import NewRequest
from evener.errors import RequestPluginError
from evener.frontend.plugins import RequestPlugins
from evener_conformance.fake_engine import FakeEngine
from evener_server.ksanallm.plugin_file import unused_file

Make = Callable[..., Any]
HIDDEN = 4
TRUSTED = {"server": {"trust_plugin_file": True}}


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A model's folder with this plug-in file."""

    def make(text: str) -> Path:
        found = Path(shutil.copytree(folder, tmp_path / "model"))
        (found / "config.json").write_text(f'{{"hidden_size": {HIDDEN}}}')
        (found / "ksana_plugin.py").write_text(text)
        return found

    return make


@pytest.fixture
def runs(make_api: Make, model: Callable[[str], Path]) -> Make:
    """A server whose model has this plug-in file, and runs it."""

    def make(text: str) -> Any:
        engine = FakeEngine(info_overrides={"hidden_size": HIDDEN, "media_rows": 64})
        return make_api(engine, model=model(text), plugins=("ksana_plugin",), options_of_packages=TRUSTED)

    return make


def last(api: Any) -> NewRequest:
    return [message for message in api.engine.sent if isinstance(message, NewRequest)][-1]  # type: ignore[no-any-return]


def test_a_file_that_nobody_trusts_does_not_run_and_the_error_names_the_key(model: Callable[[str], Path]) -> None:
    with pytest.raises(RequestPluginError, match=r"look at it, and then set server\.trust_plugin_file=true"):
        RequestPlugins.load(["ksana_plugin"], model("raise AssertionError('it ran')"), {})


def test_a_file_that_is_not_run_is_told(model: Callable[[str], Path], folder: Path) -> None:
    here = model("")
    told = unused_file(from_overrides(str(here), {})) or ""
    assert "set request.plugins=ksana_plugin and server.trust_plugin_file=true" in told
    assert unused_file(from_overrides(str(here), {"request.plugins": ["ksana_plugin"]})) is None
    assert unused_file(from_overrides(str(folder), {})) is None


@pytest.mark.parametrize(("text", "says"), [(None, "is not there"), ("a = 1", "has no class KsanaPlugin"),
                                            ("import nowhere_at_all", "nowhere_at_all")])  # fmt: skip
def test_a_file_that_cannot_run_stops_the_start(model: Callable[[str], Path], text: str | None, says: str) -> None:
    here = model(text or "")
    if text is None:
        (here / "ksana_plugin.py").unlink()
    with pytest.raises(RequestPluginError, match=says):
        RequestPlugins.load(["ksana_plugin"], here, TRUSTED)


EMBEDDINGS = f"""
class KsanaPlugin:
    def init_plugin(self, **kwargs):
        assert kwargs["preprocess"] and kwargs["postprocess"] and kwargs["model_path"]

    def preprocess(self, **kwargs):
        given = kwargs["ksana_python_input"]
        places = [at for at, token in enumerate(given.input_tokens) if token == 9]
        given.input_refit_embedding.pos = places
        given.input_refit_embedding.embedding_tensors = [[[float(at)] * {HIDDEN}] * 2 for at in places]
"""


def test_preprocess_puts_embeddings_into_the_prompt(runs: Make) -> None:
    api = runs(EMBEDDINGS)
    body = {"prompt": [1, 9, 3, 4, 9, 3, 5], "max_tokens": 1, "model": "fake"}
    assert api.post("/v1/completions", body).status_code == 200
    sent = last(api)
    assert sent.prompt == [1, 9, 3, 4, 9, 3, 5]
    assert [(item.start, item.rows) for item in sent.media] == [(1, 2), (4, 2)]
    assert sent.media[1].array().tolist() == [[4.0] * HIDDEN] * 2
    # A text is tokenized for it, and left alone if it changes nothing.
    assert api.complete(prompt="hello").status_code == 200 and not last(api).media


PERPLEXITY = """
import math

class KsanaPlugin:
    def preprocess(self, **kwargs):
        config = kwargs["ksana_python_input"].sampling_config
        config.prompt_logprobs, config.max_new_tokens = True, 1

    def postprocess(self, **kwargs):
        output = kwargs["ksana_python_output"]
        values = output.prompt_logprobs
        output.texts[-1] += f" perplexity {math.exp(-sum(values) / len(values)):.3f}"
        assert len(output.output_tokens[0]) == 1 and kwargs["ksana_python_input"].input_tokens == output.input_tokens
"""


def test_postprocess_adds_to_the_text(runs: Make, sse: Any) -> None:
    api = runs(PERPLEXITY)
    whole = api.complete(prompt="hello", max_tokens=7).json()["choices"][0]["text"]
    assert whole.endswith(" perplexity 1.649")  # all tokens have -0.5
    events = sse(api.complete(prompt="hello", stream=True))
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole
    assert api.post("/generate", {"prompt": "hello", "stream": False}).json()["texts"] == [whole]


@pytest.mark.parametrize("method", ["preprocess", "postprocess"])
def test_an_error_of_the_file_is_that_of_its_request_only(runs: Make, error: Any, method: str) -> None:
    api = runs(f"class KsanaPlugin:\n    def {method}(self, **kwargs):\n        raise KeyError('no such image')\n")
    refused = api.complete()
    assert refused.status_code == 500 and "'ksana_plugin' failed" in error(refused)["message"]
    assert api.get("/ready").status_code == 200 and api.llm.num_open == 0


def test_a_text_that_is_sent_cannot_be_taken_back(runs: Make, error: Any) -> None:
    api = runs('class KsanaPlugin:\n    def postprocess(self, **kwargs):\n'
               '        kwargs["ksana_python_output"].texts[-1] = "other"\n')  # fmt: skip
    assert "it may add to the last one" in error(api.complete())["message"]


def test_refused_requests_are_forgotten(runs: Make) -> None:
    api = runs("class KsanaPlugin:\n    def postprocess(self, **kwargs):\n        pass\n")
    ((_, plugin),) = api.llm._frontend.plugins._plugins
    assert api.complete(prompt=[1] * 500).status_code == 400
    assert api.complete().status_code == 200
    assert len(plugin._kept) == 1
