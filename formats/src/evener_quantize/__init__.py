"""``evener quantize``: a GPTQ or AWQ checkpoint from an unquantized model and a text; and integers of one layout in
another while they are read or converted. Torch-free to import.

==================  ========================================================================
module              holds
==================  ========================================================================
``command``         the command
``settings``        what is asked for
``chosen``          which matrices are quantized, and what the result stores for them
``driver``          layer after layer: run, quantize, write; interrupted, it goes on
``stage``           one layer of the model, as a pipeline stage that runs windows of tokens
``observed``        what is remembered of the inputs of linear weights
``rounding``        scales, zero points and codes of groups
``gptq``            rounding that makes up for its errors in later columns
``awq``             scales of channels, folded into what comes before, and clipping
``folded``          these scales in a layer: what they multiply, and what they divide
``folded_experts``  the same in a layer of experts
``layer``           all matrices of a layer by one of these methods
``written``         the tensors of a quantized matrix, as the published formats store them
``relaid``          the view of a quantized checkpoint in another layout; ``layouts``: which
==================  ========================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="quantize",
    summary="Make a GPTQ or AWQ checkpoint with the help of a text (`evener quantize`).",
    contracts={"descriptor": 1, "checkpoint": 1},
    commands={"quantize": "evener_quantize.command:main"},
    checkpoint_views={"relaid": "evener_quantize.relaid:RelaidCheckpoint"},
)
