"""The server over a fake engine that answers each message with a text that the tests know."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path

import uvicorn

from evener.async_llm import AsyncLLM
from evener.engine.wire.messages import NewRequest
from evener_conformance.fake_engine import FakeEngine
from evener_conformance.tiny_tokenizer import EOS_ID, write_tiny_tokenizer
from evener_server.api_keys import ApiKeys
from evener_server.app import create_app
from evener_server.options import ServerOptions
from evener_server.process import bind

TEMPLATE = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}{# <think> </think> #}"""
#: What a test waits for, in seconds; a machine with other work is slow.
PATIENCE = 60.0

RICH = r"""<think>The reader wants an overview. I will show **code**, a formula and a table.</think>## Evening a load

An *evener* is the bar that lets horses of different strength pull one load. With arms $a$ and $b$, it balances when

$$F_1 \, a = F_2 \, b \qquad\Longrightarrow\qquad \frac{F_1}{F_2} = \frac{b}{a}$$

1. Measure both arms, in `metres`.
2. Put the stronger horse on the **shorter** arm:
   - it pulls more,
   - the other pulls less, and the \(\sum_i F_i a_i\) stays zero.

| horse | force | arm |
| --- | ---: | ---: |
| Bess | 900 N | 0.40 m |
| Star | 600 N | 0.60 m |

```python
def balanced(forces: list[float], arms: list[float]) -> bool:
    # The sum of all moments is zero; a comment that is long enough to need a scroll bar where the screen is narrow.
    left, right = (force * arm for force, arm in zip(forces, arms))
    return abs(left - right) < 1e-6
```

> Equal work is not always equal force.

More in [the manual](https://example.org/manual "hint"). It costs $5, or $6 with a spare."""

HOSTILE = r"""<script>window.broken = 1</script><img src=x onerror="window.broken = 2">
<iframe srcdoc="<script>parent.broken = 3</script>"></iframe><style>body { display: none }</style>

![tracker](https://evil.example/pixel.png) [click](javascript:window.broken=4) [data](data:text/html,<script>1</script>)
<a href="javascript:window.broken=5" onclick="window.broken=6">x</a> <form action="/v1/models"><input name=q></form>
<svg onload="window.broken=7"><math><mi xlink:href="javascript:1">z</mi></math></svg>

$\href{javascript:window.broken=8}{x}$ $\htmlClass{y}{z}$ $$\rule{9999em}{9999em}$$ $\includegraphics{https://evil.example/a.png}$

```html"onmouseover="window.broken=9
<script>window.broken = 10</script>
```

<details open ontoggle="window.broken=11"><summary>s</summary></details> end of it"""

ANSWERS = {
    "rich": RICH,
    "hostile": HOSTILE,
    "long": "A sentence that goes on. " * 400,
    "count": "one two three four five six seven eight nine ten",
    "weather": 'I look it up.<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>',
    "quotes": "> " * 12000 + "deep",
}


def encode(text: str) -> list[int]:
    """The ids of a text; those of bytes are the bytes themselves."""
    return list(text.encode())


def answer(request: NewRequest) -> list[int]:
    """The scripted answer to the last message, else the message again."""
    prompt = bytes(min(i, 255) for i in request.prompt if i < 256).decode("utf-8", "replace")
    role, _, said = prompt.rstrip().removesuffix("assistant").rstrip().rpartition("\n")
    last = said if role.endswith(("user", "tool")) else prompt.rpartition("user\n")[2].removesuffix("assistant\n")
    return [*encode(ANSWERS.get(last.strip(), f"You said: {last.strip()}")), EOS_ID]


class ScriptedServer:
    """The server, in a thread. ``engine`` is the engine of the moment; ``url`` ends with a slash."""

    def __init__(self, keys: tuple[str, ...] = (), options: ServerOptions | None = None) -> None:
        self.engine = FakeEngine(answer, info_overrides={"max_model_len": 65536}, tokens_per_step=8)
        self._keys, self._options = keys, options
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._started.wait(PATIENCE)

    async def _serve(self) -> None:
        with tempfile.TemporaryDirectory() as temp:
            folder = write_tiny_tokenizer(Path(temp), TEMPLATE)
            listener = bind("127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
            llm = AsyncLLM(self.engine, model_dir=folder)
            await llm.wait_ready()
            app = create_app(llm, options=self._options, keys=ApiKeys(self._keys))
            config = uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=5
            )
            self._server = uvicorn.Server(config)
            listener.listen()
            self._started.set()
            await self._server.serve(sockets=[listener])
            await llm.close()

    def close(self) -> None:
        """Stop it; open requests end."""
        self.engine.release()
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
