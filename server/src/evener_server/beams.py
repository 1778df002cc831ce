"""Beam search for an API request: its fields, and what sends a prompt to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from evener_beam.search import BeamOptions
from evener_beam.stream import BeamStream
from pydantic import Field

from evener.async_llm import AsyncLLM
from evener.errors import RequestError
from evener.sampling_params import SamplingParams
from evener_server.messages import Body


class BeamFields(Body):
    """The fields that ask for beam search, under the names of transformers and of vLLM's API."""

    use_beam_search: bool | None = None
    #: Default: n.
    num_beams: Annotated[int | None, Field(ge=1, le=128)] = None
    length_penalty: Annotated[float | None, Field(ge=-100, le=100)] = None
    early_stopping: bool | Literal["never"] | None = None

    def beam_options(self, returned: int) -> BeamOptions | None:
        """How to search for the best ``returned`` texts; None: the request samples.

        Raises:
            RequestError: the fields contradict each other.
        """
        searches = self.use_beam_search if self.use_beam_search is not None else (self.num_beams or 1) > 1
        if not searches:
            for name in ("num_beams", "length_penalty", "early_stopping"):
                neutral = {"num_beams": (None, 1), "length_penalty": (None, 1.0), "early_stopping": (None, False)}
                if getattr(self, name) not in neutral[name]:
                    raise RequestError(f"{name} is for beam search; send use_beam_search=true, or leave it out", name)
            return None
        beams = returned if self.num_beams is None else self.num_beams
        if beams < returned:
            raise RequestError(f"n is {returned}, but num_beams is {beams}; send n or more", "num_beams")
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return BeamOptions(beams, penalty, self.early_stopping or False)


#: Sampling parameters that beam search, which draws nothing, has no use for, and their values without an effect.
_OF_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "top_p": (None, 1), "top_k": (None, -1, 0), "min_p": (None, 0), "min_tokens": (0,), "frequency_penalty": (0,),
    "presence_penalty": (0,), "repetition_penalty": (None, 1), "logit_bias": ({},), "grammar": (None,),
    "prompt_logprobs": (None,), "temperature": (None, 0, 1),
}  # fmt: skip


def check_beams(params: SamplingParams, stream: bool) -> None:
    """Raises:
    RequestError: the request asks for what beam search cannot do.
    """
    if stream:
        message = "beam search cannot be streamed: the best are only known at the end; send stream=false"
        raise RequestError(message, "stream")
    if params.stop_strings:
        raise RequestError("stop cannot be used with beam search; send stop_token_ids, or leave it out", "stop")
    for name, neutral in _OF_SAMPLING.items():
        if getattr(params, name) not in neutral:
            field = "response_format" if name == "grammar" else name
            raise RequestError(f"{field} cannot be used with beam search; leave it out", field)


async def start_beams(
    llm: AsyncLLM, prompt: str | list[int], params: SamplingParams, options: BeamOptions, n: int, request_id: str
) -> BeamStream:
    """The stream of one prompt's search.

    Raises:
        RequestError: there are too many beams, or the prompt does not fit.
    """
    prepared = await llm.prepare(prompt, params)
    return BeamStream(
        llm, request_id, prepared.ids, options, n=n, stops=prepared.eos_ids | frozenset(params.stop_token_ids),
        max_tokens=prepared.max_tokens, max_time=params.max_time, skip_special_tokens=params.skip_special_tokens,
        lora=params.lora, priority=params.priority,
    )  # fmt: skip
