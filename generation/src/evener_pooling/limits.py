"""Makes steps large enough for whole texts: an encoder computes each text in one step. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from evener.config.schema import Config
from evener.errors import ConfigError

#: What ``infer.step_tokens=auto`` gives at least, on any device.
_LEAST_STEP = 2048


def whole_texts(config: Config, longest: int) -> tuple[Config, Mapping[str, str]]:
    """The configuration of an encoder whose longest text has ``longest`` tokens, and the reasons for the keys that are
    changed. Texts are no longer than a step.

    Raises:
        ConfigError: what it asks for is not possible with this model.
    """
    infer, reasons = config.infer, {}
    length, step = infer.max_seq_len, infer.step_tokens
    if length == "auto":
        length, why = longest, "the longest text of this encoder"
        if step != "auto" and step < longest:
            length, why = step, f"infer.step_tokens, as a text is computed in one step; the model allows {longest}"
        reasons["infer.max_seq_len"] = why
    elif length > longest:
        raise ConfigError(
            f"infer.max_seq_len={length} is more than the {longest} tokens that this encoder has positions for; set at "
            f"most {longest}"
        )
    if step == "auto":
        if length > _LEAST_STEP:
            step, reasons["infer.step_tokens"] = length, "an encoder computes a text in one step"
    elif step < length:
        raise ConfigError(
            f"infer.step_tokens={step} is less than infer.max_seq_len={length}, but an encoder computes a text in one "
            f"step: set infer.step_tokens to at least {length}, or leave one of them out"
        )
    return replace(config, infer=replace(infer, max_seq_len=length, step_tokens=step)), reasons
