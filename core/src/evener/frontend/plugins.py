"""The request plugins of a run, in order: they process a request before it is submitted, and its output.

If a plugin fails, its request fails with the plugin's name in the error; other requests continue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from evener.contracts.media import MediaPrompt
from evener.contracts.outputs import Delta, RequestOutput
from evener.contracts.request_plugin import RequestPlugin
from evener.errors import RequestError, RequestPluginError, UnknownNameError
from evener.plugins.discover import installed_catalog
from evener.sampling_params import SamplingParams

T = TypeVar("T")


class RequestPlugins:
    """Prepared plugins by name; without plugins it does nothing."""

    def __init__(self, plugins: Sequence[tuple[str, RequestPlugin]] = ()) -> None:
        self._plugins = tuple(plugins)

    @classmethod
    def load(cls, names: Sequence[str], model_dir: Path, options: Mapping[str, Mapping[str, Any]]) -> RequestPlugins:
        """Import and prepare the named plugins, in this order.

        Raises:
            UnknownNameError: no installed package has one of them.
            DescriptorError: its module cannot be imported.
            RequestPluginError: its ``prepare`` failed.
        """
        known = installed_catalog().lazy_imports("request plugin")
        plugins = []
        for name in names:
            if name not in known:
                raise UnknownNameError("request plugin", name, known, "Install its package, or change request.plugins.")
            plugin: RequestPlugin = known[name].load()()
            _call(name, "prepare", plugin.prepare, str(model_dir), options.get(known[name].package, {}))
            plugins.append((name, plugin))
        return cls(plugins)

    def __bool__(self) -> bool:
        return bool(self._plugins)

    def preprocess(
        self, prompt: str | list[int] | MediaPrompt, params: SamplingParams, kind: str, request_id: str = ""
    ) -> tuple[str | list[int] | MediaPrompt, SamplingParams]:
        """The request after all plugins' ``preprocess``.

        Raises:
            RequestError: a plugin refuses the request.
            RequestPluginError: a plugin failed.
        """
        ids, media = (prompt.ids, list(prompt.media)) if isinstance(prompt, MediaPrompt) else (prompt, [])
        request: dict[str, Any] = {"prompt": ids, "params": params, "kind": kind, "media": media}
        request["request_id"] = request_id
        for name, plugin in self._plugins:
            request = _call(name, "preprocess", plugin.preprocess, request)
        if not request.get("media"):
            return request["prompt"], request["params"]
        return MediaPrompt(request["prompt"], request["media"]), request["params"]

    def postprocess_chunk(self, delta: Delta) -> Delta:
        """One streamed delta after all plugins' ``postprocess_chunk``.

        Raises:
            RequestPluginError: a plugin failed.
        """
        for name, plugin in self._plugins:
            delta = _call(name, "postprocess_chunk", plugin.postprocess_chunk, delta)
        return delta

    def postprocess(self, output: RequestOutput) -> RequestOutput:
        """A finished output after all plugins' ``postprocess``.

        Raises:
            RequestPluginError: a plugin failed.
        """
        for name, plugin in self._plugins:
            output = _call(name, "postprocess", plugin.postprocess, output)
        return output


def _call(name: str, method: str, function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except RequestError:
        raise
    except Exception as cause:  # code of another package may raise anything
        message = f"request plugin {name!r} failed in {method} with {type(cause).__name__}: {cause}"
        raise RequestPluginError(message) from cause
