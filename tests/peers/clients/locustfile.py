"""What each of locust's users does: chats, whole and streamed, and looks at the server's state."""

from __future__ import annotations

from locust import HttpUser, constant, task

_CHAT = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}


class Chatter(HttpUser):
    """One user, who sends the next request as soon as the last one is answered."""

    wait_time = constant(0)

    def on_start(self) -> None:
        """Ask for the model's name."""
        self._body = _CHAT | {"model": self.client.get("/v1/models").json()["data"][0]["id"]}

    @task(4)
    def chat(self) -> None:
        """A chat, answered whole; an answer without text is a failure."""
        with self.client.post("/v1/chat/completions", json=self._body, catch_response=True) as response:
            if response.ok and not response.json()["choices"][0]["message"]["content"]:
                response.failure("an empty answer")

    @task(2)
    def streamed_chat(self) -> None:
        """A chat, streamed; a stream without its end is a failure."""
        body = self._body | {"stream": True}
        with self.client.post("/v1/chat/completions", json=body, catch_response=True, name="streamed") as response:
            if response.ok and not response.text.rstrip().endswith("data: [DONE]"):
                response.failure("a stream without its end")

    @task(1)
    def metrics(self) -> None:
        """What Prometheus asks."""
        self.client.get("/metrics")
