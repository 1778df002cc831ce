"""``<picture NAME>`` in a prompt becomes rows of embeddings, which a vision encoder has made beforehand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from evener.contracts.media import make_item
from evener.contracts.request_plugin import RequestPlugin
from evener.errors import RequestError

#: A name has no slash and no dot: it stays in the folder.
_PICTURE = re.compile(r"<picture ([A-Za-z0-9_-]{1,64})>")
_MOST = 16


class Pictures(RequestPlugin):
    def prepare(self, model_dir: str, options: Mapping[str, Any]) -> None:
        if options["pictures"] is None:
            raise ValueError("set request-example.pictures=FOLDER")
        self._folder = Path(options["pictures"])
        self._tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))

    def preprocess(self, request: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(request["prompt"], str):
            return request
        first, *others = _PICTURE.split(request["prompt"])  # a text, then a name and a text for each picture
        if len(others) > 2 * _MOST:
            said = f"there are {len(others) // 2} pictures in the prompt, and at most {_MOST} are allowed"
            raise RequestError(said, "prompt")
        ids, media = self._tokenizer.encode(first).ids, list(request["media"])
        for name, text in zip(others[::2], others[1::2], strict=True):
            rows = self._rows(name)
            media.append(make_item(len(ids), rows))
            ids += [0] * len(rows)  # any ids: the rows take their place
            ids += self._tokenizer.encode(text, add_special_tokens=False).ids
        return {**request, "prompt": ids, "media": media} if others else request

    def _rows(self, name: str) -> np.ndarray[Any, Any]:
        """[rows, hidden size], as the model's embeddings are."""
        path = self._folder / f"{name}.npy"
        if not path.is_file():
            raise RequestError(f"there is no picture {name}", "prompt")
        return np.load(path).astype(np.float32)
