"""OpenAI's Python client: models, completions and chats, whole, streamed and asynchronous, and an error."""

from __future__ import annotations

import asyncio
import json
import sys

import openai


def main(url: str) -> None:
    """Print what came back, as JSON."""
    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Name three colours."}]
    same = {"model": model, "messages": messages, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**same)
    chunks = list(client.chat.completions.create(**same, stream=True, stream_options={"include_usage": True}))
    completion = client.completions.create(model=model, prompt="The sky is", max_tokens=4, temperature=0, logprobs=2)
    raw = client.chat.completions.with_raw_response.create(**same)
    try:
        client.chat.completions.create(model="no-such-model", messages=messages)
    except openai.NotFoundError as error:
        refused = error.code
    parallel = asyncio.run(_ask_all(url, same, 8))
    found = {
        "model": client.models.retrieve(model).id,
        "whole": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "streamed_usage": chunks[-1].usage.completion_tokens,
        "usage": whole.usage.completion_tokens,
        "raw": raw.parse().choices[0].message.content,
        "request_id": raw.request_id,
        "completion": completion.choices[0].text,
        "logprobs": len(completion.choices[0].logprobs.token_logprobs),
        "refused": refused,
        "parallel": sorted(set(parallel)),
    }
    print(json.dumps(found))


async def _ask_all(url: str, body: dict[str, object], count: int) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", max_retries=0) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**body) for _ in range(count)))
    return [answer.choices[0].message.content for answer in answers]


if __name__ == "__main__":
    main(sys.argv[1])
