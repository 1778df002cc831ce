"""A checkpoint in another form than it is stored in: while it is read (views), or stored anew (``evener convert``).
Torch-free to import.

===============  ===================================================================
module           holds
===============  ===================================================================
``quantized``    the view whose matrices are quantized; ``matrices``: which these are
``described``    the view of a folder with a quantized model's config and no weights
``split``        the view of a folder that was split for ranks
``merged``       the view of a folder that stores parts of weights together; ``merging``: how that is done
``modelslim``    the view of a folder that ModelSlim saved
``base_names``   the view of a model without its outermost module
``weight_map``   the view whose tensors are renamed by rules
``command``      the command ``evener convert``
``source``       the model that is converted, and what each file of the result holds
``pieces``       tensors that are made together, and how big they will be
``writer``       a weight file that is written tensor by tensor and continued
``gguf_file``    a GGUF file as the result; ``gguf_check``: whether it is the same model
``work``         the folder of an unfinished conversion: its lock, its key, its end
``carried``      config, tokenizer and the other files beside the weights
===============  ===================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="convert",
    summary="Read a checkpoint quantized, renamed, or split for ranks, or store it so (`evener convert`).",
    contracts={"descriptor": 1, "checkpoint": 1},
    commands={"convert": "evener_convert.command:main"},
    checkpoint_views={
        "described": "evener_convert.described:DescribedCheckpoint",
        "split": "evener_convert.split:SplitCheckpoint",
        "merged": "evener_convert.merged:MergedCheckpoint",
        "modelslim": "evener_convert.modelslim:ModelSlimCheckpoint",
        "base_names": "evener_convert.base_names:BaseCheckpoint",
        "weight_map": "evener_convert.weight_map:RenamedCheckpoint",
        "quantize": "evener_convert.quantized:QuantizedCheckpoint",
    },
)
