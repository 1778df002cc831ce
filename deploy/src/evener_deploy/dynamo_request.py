"""What Dynamo says of a request, as our parameters. Imports nothing of Dynamo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.errors import RequestError
from evener.sampling_params import SamplingParams

#: Of Dynamo's sampling options: those that mean what our parameters of the same name mean.
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "frequency_penalty",
         "presence_penalty")  # fmt: skip
#: Values of other options that change nothing, beside those that are the same for all.
_NEUTRAL: Mapping[str, float] = {"n": 1, "best_of": 1, "length_penalty": 1.0}
#: Parts of a request that only engines take which read images, or compute prompts apart from answers.
_NOT_TAKEN = ("multi_modal_data", "mm_processor_kwargs", "encoder_result", "prefill_result", "bootstrap_info")


def sampling(request: Mapping[str, Any]) -> SamplingParams:
    """Our parameters of a request's.

    Raises:
        RequestError: a value is out of range, or an option is not supported.
    """
    options, stops = dict(request.get("sampling_options") or {}), dict(request.get("stop_conditions") or {})
    found = {name: options.pop(name) for name in _SAME if options.get(name) is not None}
    found |= {name: stops.pop(name) for name in ("max_tokens", "min_tokens", "ignore_eos")
              if stops.get(name) is not None}  # fmt: skip
    ids = [*(stops.pop("stop_token_ids_hidden", None) or ()), *(stops.pop("stop_token_ids", None) or ())]
    stops.pop("stop", None)  # Dynamo's frontend finds stop strings, and ends the request
    output = dict(request.get("output_options") or {})
    for name in ("skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"):
        output.pop(name, None)  # about text, which the frontend makes
    apart = {name: request.get(name) for name in _NOT_TAKEN}
    for name, value in {**options, **stops, **output, **apart}.items():
        neutral = name in _NEUTRAL and value == _NEUTRAL[name]
        if not (value is None or value is False or value in ([], {}) or neutral):
            raise RequestError(f"{name} is not supported by evener under Dynamo; leave it out", name)
    return SamplingParams(stop_token_ids=ids, detokenize=False, **found)
