"""The fields of KsanaLLM's API, with its names, and its defaults where they change what is generated."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import Field

from evener.contracts.grammar.library import GrammarSpec
from evener.errors import RequestError
from evener.sampling_params import MAX_REPETITION, MAX_STOP_IDS, MIN_REPETITION, SamplingParams
from evener_server.field_types import INT32, Likeliest, Stops, TokenId
from evener_server.messages import Body, allowed_values
from evener_server.protocol import PromptBody

#: Prompts of one request to /forward, and targets of one prompt.
MOST_PROMPTS, MOST_TARGETS = 1024, 16
#: Tokens of a sequence that does not come again: each of the context's is kept.
MOST_REPEATED = 64
#: Of ``input_refit_embedding``: KsanaLLM's clients send one for each image.
MOST_EMBEDDINGS = 1024

Ids: TypeAlias = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Range: TypeAlias = Annotated[list[Annotated[int, Field(ge=-INT32, le=INT32)]], Field(min_length=2, max_length=2)]


class Embeddings(Body):
    """Rows that the model reads in place of the embeddings of tokens: number i begins at position ``pos[i]`` and is one
    row, or several one after another."""

    pos: Annotated[list[Annotated[int, Field(ge=0, le=INT32)]], Field(max_length=MOST_EMBEDDINGS)] | None = None
    embeddings: (
        Annotated[list[Annotated[list[float], Field(fail_fast=True)]], Field(max_length=MOST_EMBEDDINGS)] | None
    ) = None


class PromptFields(Body):
    """A prompt: a text, or its ids, which win."""

    prompt: str | None = None
    input_tokens: Ids | None = None
    input_refit_embedding: Embeddings | None = None


def check_prompt(prompt: PromptFields, place: str = "") -> None:
    """Raises:
    RequestError: there is no prompt, or its embeddings have no places; ``place`` comes before the names of fields.
    """
    if prompt.prompt is None and prompt.input_tokens is None:
        message = f"{place}prompt is missing; send a text, or token ids as {place}input_tokens"
        raise RequestError(message, f"{place}prompt", "missing_required_parameter")
    rows = prompt.input_refit_embedding or Embeddings()
    places, given = len(rows.pos or ()), len(rows.embeddings or ())
    if places != given:
        name = f"{place}input_refit_embedding"
        message = f"{name} has {places} positions and {given} embeddings; send one for each"
        raise RequestError(message, name)


class SamplingConfig(Body):
    """How to sample. Without ``topk`` it is greedy, as in KsanaLLM."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    #: 1: greedy. 0 and -1: no limit.
    topk: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    #: 0: no limit, as 1.
    topp: Annotated[float, Field(ge=0, le=1)] | None = None
    #: False: greedy.
    do_sample: bool | None = None
    num_beams: Annotated[int, Field(ge=1, le=128)] | None = None
    num_return_sequences: Annotated[int, Field(ge=1, le=128)] | None = None
    length_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION, le=MAX_REPETITION)] | None = None
    #: No sequence of so many tokens comes a second time, counted over prompt and text; 0: any may.
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=MOST_REPEATED)] | None = None
    #: No sequence of so many tokens of the prompt comes in the text.
    encoder_no_repeat_ngram_size: Annotated[int, Field(ge=0, le=MOST_REPEATED)] | None = None
    #: -1, and by default: the rest of the context.
    max_new_tokens: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS, fail_fast=True)] | None = None
    stop_strings: Stops = None
    ignore_eos: bool | None = None
    #: Likeliest tokens whose log-probabilities are returned with each token.
    logprobs: Likeliest | None = None
    #: Of our own, for repeatable samples.
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.do_sample is False or self.topk in (None, 1) or self.temperature == 0

    def without_repeats(self, params: SamplingParams) -> SamplingParams:
        """``params`` with which no sequence comes a second time that must not."""
        sizes = (self.no_repeat_ngram_size or 0, self.encoder_no_repeat_ngram_size or 0)
        if not any(sizes):
            return params
        grammar = params.grammar or GrammarSpec(kind="any", text="")
        return replace(params, grammar=msgspec.structs.replace(grammar, no_repeat=sizes))

    def fields(self) -> dict[str, Any]:
        """The same in the names of /v1/completions."""
        beams = self.num_beams if (self.num_beams or 1) > 1 else None
        found = {
            "temperature": 0.0 if self.greedy and beams is None else self.temperature,
            "top_k": None if self.greedy else self.topk,
            "top_p": None if self.greedy else self.topp or None,
            "n": self.num_return_sequences, "num_beams": beams,
            "length_penalty": None if beams is None else self.length_penalty,
            "repetition_penalty": self.repetition_penalty,
            "max_tokens": self.max_new_tokens if (self.max_new_tokens or 0) > 0 else None,
            "stop_token_ids": self.stop_token_ids, "stop": self.stop_strings, "ignore_eos": self.ignore_eos,
            "logprobs": self.logprobs or None, "seed": self.seed,
        }  # fmt: skip
        return {name: value for name, value in found.items() if value is not None}


class KsanaBody(PromptBody):
    """The fields of both endpoints that cannot be used."""

    truncate_prompt_tokens: Annotated[Any, allowed_values(hint="; send fewer tokens")] = None
    truncation_side: Annotated[Any, allowed_values()] = None
    add_special_tokens: Annotated[Any, allowed_values(True, hint="; send input_tokens")] = None


class GenerateBody(KsanaBody, PromptFields):
    """POST /generate."""

    sampling_config: SamplingConfig | None = None
    #: Default: true, as in KsanaLLM.
    stream: bool | None = None
    #: What the text has to match.
    structured_output_regex: str | None = None
    messages: Annotated[Any, allowed_values(hint="; send conversations to /v1/chat/completions")] = None
    additional_params: Annotated[Any, allowed_values({})] = None

    def check(self) -> None:
        super().check()
        check_prompt(self)
        config = self.sampling_config or SamplingConfig()
        beams, returned = config.num_beams or 1, config.num_return_sequences or 1
        if 1 < beams < returned:
            message = f"num_return_sequences is {returned}, but num_beams is {beams}; send as many beams"
            raise RequestError(message, "sampling_config.num_return_sequences")
        if config.max_new_tokens == 0:
            raise RequestError("sampling_config.max_new_tokens is 0; send 1 or more, or -1 for the rest of the context",
                               "sampling_config.max_new_tokens")  # fmt: skip


class Target(Body):
    """What is wanted of which of a prompt's tokens; by default of all.

    ``target_name``: ``transformer``: hidden states before the last norm; ``layernorm``: after it; ``logits``.
    """

    target_name: Literal["transformer", "layernorm", "logits"]
    #: Every token that has one of these ids.
    token_id: list[TokenId] | None = None
    #: From the first position to the second, both included; negative ones count from the end.
    slice_pos: list[Range] | None = None
    #: GATHER_TOKEN_ID, for logits only: the probability of the token that follows. Default for them.
    token_reduce_mode: Literal["GATHER_ALL", "GATHER_TOKEN_ID"] | None = None

    @property
    def next_token(self) -> bool:
        """Whether probabilities of following tokens are wanted."""
        mode = self.token_reduce_mode or ("GATHER_TOKEN_ID" if self.target_name == "logits" else "GATHER_ALL")
        return mode == "GATHER_TOKEN_ID"


class ForwardPrompt(PromptFields):
    """One prompt of a request to /forward."""

    request_target: Annotated[list[Target], Field(min_length=1, max_length=MOST_TARGETS)]


class ForwardBody(KsanaBody):
    """POST /forward."""

    requests: Annotated[list[ForwardPrompt], Field(min_length=1, max_length=MOST_PROMPTS)]

    def check(self) -> None:
        super().check()
        for number, prompt in enumerate(self.requests):
            check_prompt(prompt, f"requests[{number}].")
            for which, target in enumerate(prompt.request_target):
                place = f"requests[{number}].request_target[{which}]"
                if target.next_token and target.target_name != "logits":
                    raise RequestError(f"{place}.token_reduce_mode is GATHER_TOKEN_ID, which is for logits only; send "
                                       "GATHER_ALL", f"{place}.token_reduce_mode")  # fmt: skip
                if target.token_id and (target.slice_pos or target.next_token):
                    what = "slice_pos" if target.slice_pos else "GATHER_TOKEN_ID"
                    message = f"{place}.token_id cannot be used with {what}; send one of them"
                    raise RequestError(message, f"{place}.token_id")
