"""Names of the classes of models without a language model head. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Collection


def registered_name(architecture: str, known: Collection[str]) -> str:
    """The name under which a class is registered that computes an ``architecture`` of transformers: of ``XModel`` and
    ``XForSequenceClassification`` that of ``XForCausalLM``."""
    full = re.sub(r"(Model|ForSequenceClassification)$", "ForCausalLM", architecture)
    return full if architecture not in known and full in known else architecture
