"""Encoders of texts: each token reads the whole text. They make vectors and scores, and generate nothing.

Torch-free.

==============  ======================================================================
module          what it holds
==============  ======================================================================
``bert``        BERT and DistilBERT
``roberta``     RoBERTa and XLM-RoBERTa
``modernbert``  ModernBERT
``encoder``     what these have in common; another family subclasses it
``layers``      a layer of an encoder, and the head for a label
``whole``       the kind of state: nothing is kept, and a text is computed in one step
``attention``   the provider of that kind; needs torch
``plugin``      what the package registers
==============  ======================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

#: Each with a head for masked tokens, which is not read, a head for labels, and without a head.
_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification")
_FAMILIES = {
    "Bert": "evener_encoders.bert:Bert", "DistilBert": "evener_encoders.bert:DistilBert",
    "Roberta": "evener_encoders.roberta:Roberta", "XLMRoberta": "evener_encoders.roberta:Roberta",
    "ModernBert": "evener_encoders.modernbert:ModernBert",
}  # fmt: skip

descriptor = Descriptor(
    name="encoders",
    summary="Encoders of texts: BERT, DistilBERT, RoBERTa, XLM-RoBERTa, ModernBERT.",
    contracts={"descriptor": 1, "architecture": 2, "layers": 2, "state": 2},
    module="evener_encoders.plugin",
    architectures={f"{name}{head}": target for name, target in _FAMILIES.items() for head in _HEADS},
    state_kinds=("whole",),
    states=("encoders.whole",),
)
