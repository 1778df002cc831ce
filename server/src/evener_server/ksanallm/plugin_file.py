"""``ksana_plugin.py`` in a model's folder, as KsanaLLM runs it, as a request plugin: ``request.plugins=ksana_plugin``.

The file has a class ``KsanaPlugin`` with up to three methods. All get keyword arguments only:

- ``init_plugin``: once, with ``model_path``, and ``preprocess`` and ``postprocess``, which are true.
- ``preprocess``: before a request runs, with ``ksana_python_input``. It may change its ``input_tokens``, its
  ``sampling_config``, and fill ``input_refit_embedding`` with positions and embeddings.
- ``postprocess``: when a request has ended, with ``ksana_python_input`` and ``ksana_python_output``. It may add to the
  ``texts``.

The file is a program of whoever made the folder. So it runs only if the operator has set ``server.trust_plugin_file``.
"""

from __future__ import annotations

import importlib.util
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np

from evener.config import Config
from evener.contracts.media import make_item
from evener.contracts.outputs import Delta
from evener.contracts.request_plugin import RequestPlugin
from evener.errors import ConfigError, RequestError
from evener.frontend.tokenizer import Tokenizer
from evener.loading.checkpoint import open_files
from evener.sampling_params import SamplingParams

FILE = "ksana_plugin.py"
NAME = "ksana_plugin"
KEY = "server.trust_plugin_file"
#: Requests whose input is kept for ``postprocess``. Those that were refused after ``preprocess`` never end here: the
#: oldest are forgotten.
_MOST_KEPT = 1 << 14
#: KsanaLLM's names of parameters, and ours.
_NAMES: Mapping[str, str] = {
    "temperature": "temperature", "topk": "top_k", "topp": "top_p", "max_new_tokens": "max_tokens",
    "repetition_penalty": "repetition_penalty", "stop_token_ids": "stop_token_ids", "logprobs_num": "logprobs",
    "num_return_sequences": "n",
}  # fmt: skip


@dataclass
class _Kept:
    """A request between ``preprocess`` and ``postprocess``."""

    given: SimpleNamespace
    samples: int
    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[list[tuple[int, float]]]] = field(default_factory=dict)
    prompt_logprobs: list[float] = field(default_factory=list)
    ended: int = 0


class PluginFile(RequestPlugin):
    """See the module's docstring."""

    def prepare(self, model_dir: str, options: Mapping[str, Any]) -> None:
        path = Path(model_dir) / FILE
        if not options.get("trust_plugin_file"):
            raise ConfigError(f"request.plugins=ksana_plugin runs {path}, which is a program: look at it, and then set "
                              f"{KEY}=true")  # fmt: skip
        self._plugin = _load(path)
        self._tokenizer = Tokenizer.of(open_files(Path(model_dir)))
        self._width = _hidden_size(Path(model_dir))
        # Requests come in several threads, and the file may load a model that serves one.
        self._one_at_a_time = Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        if hasattr(self._plugin, "init_plugin"):
            self._plugin.init_plugin(model_path=model_dir, preprocess=True, postprocess=True)

    def preprocess(self, request: dict[str, Any]) -> dict[str, Any]:
        params: SamplingParams = request["params"]
        if request["kind"] == "embed":
            return request
        ids = self._ids(request["prompt"], request["kind"])
        config = SimpleNamespace(**{name: getattr(params, own) for name, own in _NAMES.items()}, prompt_logprobs=False)
        rows = SimpleNamespace(pos=[], embeddings=[], embedding_tensors=[])
        given = SimpleNamespace(input_tokens=list(ids), input_refit_embedding=rows, sampling_config=config)
        if hasattr(self._plugin, "preprocess"):
            with self._one_at_a_time:
                self._plugin.preprocess(ksana_python_input=given)
        items = [*request["media"], *self._items(rows)]
        params = _changed(params, config)
        changed: dict[str, Any] = {"params": params, "media": sorted(items, key=lambda item: item.start)}
        if items or list(given.input_tokens) != ids:
            changed["prompt"] = [int(token) for token in given.input_tokens]
        if hasattr(self._plugin, "postprocess"):
            with self._one_at_a_time:
                self._kept[request["request_id"]] = _Kept(given, params.n)
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
        return {**request, **changed}

    def postprocess_chunk(self, chunk: Delta) -> Delta:
        kept = self._kept.get(chunk.request_id)
        if kept is None:
            return chunk
        at = chunk.index
        kept.texts[at] = kept.texts.get(at, "") + chunk.text
        kept.tokens.setdefault(at, []).extend(chunk.token_ids)
        kept.logprobs.setdefault(at, []).extend(list(entry.items()) for entry in chunk.logprobs or ())
        kept.prompt_logprobs += [next(iter(entry.values())) for entry in chunk.prompt_logprobs or () if entry]
        if chunk.finish_reason is None:
            return chunk
        kept.ended += 1
        if kept.ended < kept.samples:
            return chunk
        with self._one_at_a_time:
            self._kept.pop(chunk.request_id, None)
        # The samples that ended before are sent already: only this one's text can grow.
        return replace(chunk, text=chunk.text + self._added(kept, at))

    def _added(self, kept: _Kept, at: int) -> str:
        """What the file's ``postprocess`` adds to the text of sample ``at``."""
        order = sorted(kept.texts)
        output = SimpleNamespace(
            input_tokens=kept.given.input_tokens, output_tokens=[kept.tokens[i] for i in order],
            logprobs=[kept.logprobs[i] for i in order], texts=[kept.texts[i] for i in order],
            prompt_logprobs=kept.prompt_logprobs,
        )  # fmt: skip
        self._plugin.postprocess(ksana_python_input=kept.given, ksana_python_output=output)
        for place, i in enumerate(order):
            text = str(output.texts[place])
            if not text.startswith(kept.texts[i]) or (i != at and text != kept.texts[i]):
                raise ValueError("it changed a text that is sent already; it may add to the last one")
        return str(output.texts[order.index(at)])[len(kept.texts[at]) :]

    def _ids(self, prompt: str | list[int], kind: str) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self._tokenizer is None:
            raise RequestError("the model folder has no tokenizer, which ksana_plugin needs for a text: send token ids")
        return self._tokenizer.encode(prompt, add_special_tokens=kind != "chat")

    def _items(self, rows: SimpleNamespace) -> list[Any]:
        given = list(rows.embedding_tensors) or list(rows.embeddings)
        if len(given) != len(rows.pos):
            raise ValueError(f"input_refit_embedding has {len(rows.pos)} positions and {len(given)} embeddings")
        arrays = [_array(each).reshape(-1, self._width) for each in given]
        return [make_item(int(at), array) for at, array in zip(rows.pos, arrays, strict=True)]


def unused_file(config: Config) -> str | None:
    """A warning for a model's folder with such a file that does not run; None: there is none, or it runs."""
    path = Path(config.model) / FILE
    if NAME in config.request.plugins or not path.is_file():
        return None
    return f"{path} is not run; to run it, look at it, and set request.plugins={NAME} and {KEY}=true"


def _load(path: Path) -> Any:
    """An object of the file's class.

    Raises:
        ConfigError: there is no such file, or no class in it.
    """
    spec = importlib.util.spec_from_file_location("ksana_plugin", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"{path} is not there; leave request.plugins=ksana_plugin out")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "KsanaPlugin"):
        raise ConfigError(f"{path} has no class KsanaPlugin; write one")
    return module.KsanaPlugin()


def _hidden_size(folder: Path) -> int:
    """Numbers of an embedding, of ``config.json``; -1, one row for each array, if it does not say."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return int(config.get("hidden_size", -1))


def _array(value: Any) -> np.ndarray[Any, Any]:
    """Float32 numbers of a list, an array, or a tensor of torch on any device."""
    if hasattr(value, "detach"):
        value = value.detach().float().cpu().numpy()
    return np.asarray(value, dtype=np.float32)


def _changed(params: SamplingParams, config: SimpleNamespace) -> SamplingParams:
    """``params`` with what the plug-in changed."""
    wanted = {own: getattr(config, name) for name, own in _NAMES.items()}
    changes = {own: value for own, value in wanted.items() if value != getattr(params, own)}
    if config.prompt_logprobs and params.prompt_logprobs is None:
        changes["prompt_logprobs"] = 0
    return replace(params, **changes) if changes else params
