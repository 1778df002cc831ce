"""Puts the streamed deltas of a request together."""

from __future__ import annotations

from dataclasses import replace

from evener.contracts.outputs import CompletionOutput, Delta, RequestOutput


class OutputBuilder:
    """Puts the deltas of one request together."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], n: int) -> None:
        self._output = RequestOutput(request_id, prompt, prompt_token_ids, [CompletionOutput(i) for i in range(n)])
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._open = n

    def add(self, delta: Delta) -> None:
        """Add the next delta."""
        output, sample = self._output, self._output.outputs[delta.index]
        self._texts[delta.index].append(delta.text)
        sample.token_ids += delta.token_ids
        sample.pooled += delta.pooled
        if delta.logprobs is not None:
            sample.logprobs = sample.logprobs or []
            sample.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = (output.prompt_logprobs or []) + delta.prompt_logprobs
        output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
        output.error = output.error or delta.error
        if delta.finish_reason is not None:
            sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
            self._open -= 1
            output.finished = self._open == 0

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return self._output.finished

    def snapshot(self) -> RequestOutput:
        """A copy of the output so far; later deltas do not change it."""
        out = self._output
        samples = []
        for sample, pieces in zip(out.outputs, self._texts, strict=True):
            pieces[:] = ["".join(pieces)]
            logprobs = None if sample.logprobs is None else list(sample.logprobs)
            samples.append(replace(sample, text=pieces[0], token_ids=list(sample.token_ids), logprobs=logprobs))
        return replace(out, outputs=samples)
