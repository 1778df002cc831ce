"""``evener convert``: a checkpoint stored anew, quantized, or split for ranks. Torch-free to import.

===============  ===================================================================
module           holds
===============  ===================================================================
``command``      the command
``source``       the model that is converted, and what each file of the result holds
``pieces``       tensors that are made together, and how big they will be
``writer``       a safetensors file that is written tensor by tensor and continued
``work``         the folder of an unfinished conversion: its lock, its key, its end
``carried``      config, tokenizer and the other files beside the weights
===============  ===================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="convert",
    summary="Store a checkpoint anew: quantized, or split for ranks (`evener convert`).",
    contracts={"descriptor": 1},
    commands={"convert": "evener_convert.command:main"},
)
