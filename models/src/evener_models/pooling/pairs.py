"""How a tokenizer joins the two texts of a pair, from ``tokenizer.json``."""

from __future__ import annotations

from typing import Any

from evener.contracts.checkpoint import ModelFiles


def pair_separator(files: ModelFiles) -> int | None:
    """The id of the token behind the first text; None if there is none, or the tokenizer has no rule for pairs."""
    step = files.json("tokenizer.json").get("post_processor")
    steps = step.get("processors") if isinstance(step, dict) and step.get("type") == "Sequence" else [step]
    found = (_separator(each) for each in (steps if isinstance(steps, list) else []) if isinstance(each, dict))
    return next((token for token in found if token is not None), None)


def _separator(step: dict[str, Any]) -> int | None:
    """Of one step of a post-processor, in either form in which the library saves it."""
    try:
        if step.get("type") in ("BertProcessing", "RobertaProcessing"):
            token = step["sep"][1]
        else:
            pair = step["pair"]
            behind = next(i for i, piece in enumerate(pair) if piece.get("Sequence", {}).get("id") == "A") + 1
            token = step["special_tokens"][pair[behind]["SpecialToken"]["id"]]["ids"][0]
    except (KeyError, IndexError, TypeError, AttributeError, StopIteration):
        return None
    return token if type(token) is int else None
