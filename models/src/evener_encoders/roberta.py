"""RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2020), as bge-m3 and multilingual-e5 have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import Builder
from evener.layers.config_json import read_int, unsupported
from evener_encoders.bert import Bert
from evener_encoders.layers import LabelHead


class Roberta(Bert):
    """Differs from BERT: the first token has the position ``pad_token_id`` + 1. Positions before it are of padding, of
    which a text has none."""

    names = ("roberta.embeddings.word_embeddings", "roberta.encoder.layer")
    embedding_names = (
        "roberta.embeddings.position_embeddings", "roberta.embeddings.token_type_embeddings",
        "roberta.embeddings.LayerNorm",
    )  # fmt: skip
    unread = (r"roberta\.pooler\..*", r"(roberta\.)?(lm_head|classifier)\..*")
    unread_by_head = (r"roberta\.pooler\..*",)

    @classmethod
    def longest_text(cls, config: Mapping[str, Any]) -> int | None:
        rows, padding = read_int(config, "max_position_embeddings"), config.get("pad_token_id", 1)
        if type(padding) is not int or not 0 <= padding < rows - 1:
            raise unsupported(config, "pad_token_id", f"it must be less than max_position_embeddings = {rows}")
        return rows - padding - 1

    def label_head(self, config: Mapping[str, Any], build: Builder) -> LabelHead:
        return LabelHead(build, ("classifier.dense", "classifier.out_proj"), self.hidden_size, "tanh")

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        changes = {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "max_position_embeddings": 130}
        return {**super().tiny_config(), **changes, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
