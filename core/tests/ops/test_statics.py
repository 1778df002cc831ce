"""The typed records of static parameters, the schemas and what layers declare have the same names."""

from __future__ import annotations

import pytest

from evener.contracts import statics
from evener.contracts.ops import OpSchema
from evener.layers.builder import Builder
from evener.layers.decoder import DecoderLayer, MixerLayer
from evener.layers.embedding import LMHead
from evener.layers.norms import norm_common
from evener.ops.schemas import BUILTIN
from evener_conformance.kit.families import families

COMPOSITES = {schema.name: schema for schema in BUILTIN if schema.composite}
RECORDS: dict[str, type] = {
    "norm_qkv_rotary_write": statics.QKVStatic,
    "attention_block": statics.AttentionStatic,
    "mlp_block": statics.MLPStatic,
    "routed_experts": statics.ExpertsStatic,
    "moe_block": statics.MoEStatic,
    "decoder_layer": statics.DecoderLayerStatic,
    "latent_attend": statics.LatentAttendStatic,
    "index_block": statics.IndexStatic,
    "latent_attention_block": statics.LatentStatic,
    "delta_block": statics.DeltaStatic,
    "gated_attention_block": statics.GatedAttentionStatic,
    "head": statics.HeadStatic,
    "vocab_greedy": statics.HeadStatic,
    "vocab_embedding": statics.VocabEmbeddingStatic,
    "all_reduce_norm": statics.AllReduceNormStatic,
}


@pytest.mark.parametrize("schema", COMPOSITES.values(), ids=COMPOSITES)
def test_a_composites_schema_names_the_keys_of_its_record(schema: OpSchema) -> None:
    record = RECORDS[schema.name]
    assert schema.static.keys() == set(record.__annotations__)
    assert all(schema.static.values()), "every parameter has a text"


def test_layers_declare_exactly_the_static_parameters_of_the_schemas() -> None:
    declared = set()
    for family in families():
        build = Builder("float32", 64, absorb=family.absorb)
        layer = DecoderLayer if type(family.attention).__name__ == "AttentionConfig" else MixerLayer
        layer(build, "layers.0", 96, family.attention, family.mlp, 1e-5, family.offset, family.norm)  # type: ignore[arg-type]
        LMHead(build, "head.weight", "norm", 67, norm_common(build, 96, 1e-5, family.offset, family.norm))
        for site in build.sites:
            assert site.static.keys() == COMPOSITES[site.op].static.keys(), f"{family.name}: {site.op}"
            declared.add(site.op)
    assert declared >= {"decoder_layer", "moe_block", "latent_attention_block", "delta_block", "gated_attention_block"}
