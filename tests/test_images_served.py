"""A folder of Qwen-VL, the OpenAI client's image parts, and what is done about images that cannot be used."""

from __future__ import annotations

import base64
import io
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
from family_oracles import Plain
from family_table import QWEN_VL, Row
from PIL import Image
from reference_vision import QwenVL

from evener import LLM, SamplingParams
from evener.async_llm import AsyncLLM
from evener.config import from_overrides
from evener.config.schema import Config
from evener.contracts.media import MediaPrompt
from evener.engine.processes.start import start_engine
from evener.errors import ContextLengthError, RequestError
from evener.frontend.settings import FrontendSettings
from evener_conformance.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer
from evener_server import images
from evener_server.app import create_app

START = VOCAB_SIZE
VISUAL: dict[str, Any] = {**QWEN_VL["visual"], "image_start_id": START}  # type: ignore[dict-item]
ROWS = VISUAL["n_queries"]


def png(seed: int, size: tuple[int, int] = (31, 57), kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(link: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": link}}


def seen(data: bytes) -> dict[str, Any]:
    """The same in this process."""
    return {"type": "image", "image": Image.open(io.BytesIO(data))}


def asks(*parts: str | dict[str, Any]) -> list[dict[str, Any]]:
    """One message of texts and images."""
    content = [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("qwen-vl")
    changes = {**QWEN_VL, "visual": VISUAL, "vocab_size": 283, "eos_token_id": 258}
    Plain(QwenVL)(Row("QWenLMHeadModel", changes).config, folder)
    write_tiny_tokenizer(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["<img>", "</img>", "<imgpad>"])
    library.save(str(folder / "tokenizer.json"))
    assert library.token_to_id("<img>") == START
    limits = {"infer.max_seq_len": 256, "infer.max_reqs": 4, "infer.threads": 1, "infer.kv_memory": 2**24}
    return from_overrides(str(folder), {"backend": "cpu", "dtype": "float32", **limits})


@pytest.fixture(scope="module")
def llm(config: Config) -> Iterator[LLM]:
    with LLM.from_client(start_engine(config, "inline"), settings=FrontendSettings.from_config(config)) as made:
        yield made


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_an_image_becomes_the_models_own_words_and_the_encoders_rows(llm: LLM) -> None:
    data = png(0)
    prompt = llm._chat.prompt(asks(seen(data), "What is it?", seen(png(1, kind="JPEG"))))
    assert isinstance(prompt, MediaPrompt) and llm.tokenizer is not None
    pads = "<imgpad>" * ROWS
    shown = f"Picture 1: <img>{pads}</img>\nWhat is it?\nPicture 2: <img>{pads}</img>"
    text = f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
    assert llm.tokenizer.decode(prompt.ids, skip_special_tokens=False) == text
    assert [prompt.ids[item.start - 1] for item in prompt.media] == [START, START]
    wanted = Image.open(io.BytesIO(data)).resize((42, 42), Image.Resampling.BICUBIC)
    assert np.array_equal(prompt.media[0].array(), np.asarray(wanted))
    assert prompt.media[0].shape == [42, 42, 3] and prompt.media[0].rows == ROWS


def test_the_answer_follows_the_image_and_the_same_image_is_found_in_the_cache(llm: LLM) -> None:
    first, other, text = asks("See", seen(png(0))), asks("See", seen(png(1))), asks("See", "nothing")
    answers = [llm.chat(messages, GREEDY)[0] for messages in (first, other, text, first)]
    tokens = [tuple(answer.outputs[0].token_ids) for answer in answers]
    assert tokens[0] == tokens[3] and len(set(tokens)) == 3
    assert answers[3].num_cached_tokens > answers[1].num_cached_tokens
    together = llm.chat([first, other, text], GREEDY)
    assert [tuple(answer.outputs[0].token_ids) for answer in together] == tokens[:3]


class Post:
    """``/v1/chat/completions`` of the model, in this process; ``takes``: what the model takes, as the server says."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.takes: list[str] = []

    async def __call__(self, **fields: Any) -> httpx.Response:
        llm = AsyncLLM(start_engine(self.config, "thread"), settings=FrontendSettings.from_config(self.config))
        await llm.wait_ready()
        transport = httpx.ASGITransport(create_app(llm))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                (card,) = (await client.get("/v1/models")).json()["data"]
                name, self.takes = card["id"], card["input_modalities"]
                body = {"model": name, "temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields}
                return await client.post("/v1/chat/completions", json=body)
        finally:
            await llm.close()


async def test_the_api_answers_about_an_image_as_the_library_does(config: Config, llm: LLM) -> None:
    post = Post(config)
    answer = await post(messages=asks(part(url(png(3))), "What is it?"))
    assert post.takes == ["text", "image"]
    wanted = llm.chat(asks(seen(png(3)), "What is it?"), GREEDY)[0]
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == wanted.outputs[0].text
    assert answer.json()["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)


async def test_the_api_refuses_an_address_and_says_what_to_send(config: Config) -> None:
    answer = await Post(config)(messages=asks("Look", part("https://example.org/cat.png")))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages[0].content[1].image_url.url"
    assert "does not fetch images" in error["message"] and "data:image/png;base64" in error["message"]


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("http://example.org/cat.png", "is an address, but this server does not fetch images"),
        ("file:///etc/passwd", "does not fetch images"),
        ("data:image/png,abc", "has no base64"),
        ("data:image/png;base64", "has no base64"),
        ("data:image/png;base64,@@@", "is not valid base64"),
        (url(b""), "cannot be read as an image"),
        (url(b"%PDF-1.4 no image"), "cannot be read as an image"),
        (url(png(0)[:200]), "cannot be read as an image"),
    ],
)
def test_something_other_than_an_image_is_refused_with_its_place(link: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        images.decode_images([{"role": "system", "content": "see"}, *asks("a", part(link))])
    assert refused.value.param == "messages[1].content[1].image_url.url" and refused.value.status == 400


@pytest.mark.parametrize("side", [40, 20_000, 100_000])
def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(side: int) -> None:
    data = png(0, (40, 40))
    # The size is read from the header: nobody has to hold 10 GB to say that it has.
    huge = data[:16] + side.to_bytes(4, "big") * 2 + data[24:29]
    huge += zlib.crc32(huge[12:29]).to_bytes(4, "big") + data[33:]
    with pytest.raises(RequestError, match=r"is too large.*but 1,560 of the request's 67,108,864 are left"):
        images.open_image(huge, "here", 39 * 40)


def test_the_images_of_a_request_are_counted_and_so_are_their_pixels_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="send at most 32"):
        images.decode_images(asks(*[part(url(png(0)))] * 33))
    monkeypatch.setattr(images, "MAX_PIXELS", 31 * 57 * 2 + 5)
    with pytest.raises(RequestError, match="it has 57 x 31 pixels, but 5 of the request's 3,539 are left") as refused:
        images.decode_images(asks(part(url(png(0))), "and", part(url(png(1))), part(url(png(2)))))
    assert refused.value.param == "messages[0].content[3].image_url.url"


def test_a_missing_pillow_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    data = png(0)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RequestError, match=r"pip install 'evener\[images\]'"):
        images.open_image(data, "here")


@pytest.mark.parametrize(
    ("messages", "error", "words"),
    [
        (asks("<img></img>", seen(png(0))), RequestError, "has 1 images, but its text has 2 image marks"),
        (asks("<img>cat.png</img>", seen(png(0))), RequestError, "leave it out"),
        (asks(*[seen(png(0))] * 29), ContextLengthError, "shorten the prompt"),
        ([{"role": "user", "content": [seen(png(0)), "hi"]}], RequestError, "of type None"),
        ("hi", RequestError, "messages must be"),
    ],
)
def test_texts_that_mark_images_themselves_and_more_images_than_fit_are_refused(
    messages: Any, error: type[RequestError], words: str, llm: LLM
) -> None:
    with pytest.raises(error, match=words):
        llm.chat(messages, GREEDY)


async def test_a_model_that_reads_text_only_says_so(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**Row("QWenLMHeadModel").config, "vocab_size": VOCAB_SIZE}))
    limits = {"load": "dummy", "backend": "cpu", "dtype": "float32", "infer.kv_memory": 2**22}
    post = Post(from_overrides(str(tmp_path), limits))
    answer = await post(messages=asks("a", part(url(png(0)))))
    assert post.takes == ["text"]
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages[0].content[1].type"
    assert error["code"] == "unsupported_parameter" and "takes parts of type 'text' only" in error["message"]
