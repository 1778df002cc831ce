"""The model families that evener ships, registered through the same hook as anybody else's. Torch-free."""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="models",
    summary="Llama, Mistral, Qwen, Gemma, GLM, gpt-oss, Phi, StableLM, Cohere, DeepSeek and more.",
    contracts={"descriptor": 1, "architecture": 2, "layers": 2, "checkpoint": 1},
    architectures={
        "BaiChuanForCausalLM": "evener_models.baichuan:BaichuanForCausalLM",
        "BaichuanForCausalLM": "evener_models.baichuan:BaichuanForCausalLM",
        "ChatGLMForConditionalGeneration": "evener_models.chatglm:ChatGLMModel",
        "ChatGLMModel": "evener_models.chatglm:ChatGLMModel",
        "QWenLMHeadModel": "evener_models.qwen:QWenLMHeadModel",
        "CohereForCausalLM": "evener_models.cohere:CohereForCausalLM",
        "GlmForCausalLM": "evener_models.glm:GlmForCausalLM",
        "Glm4ForCausalLM": "evener_models.glm:Glm4ForCausalLM",
        "PhiForCausalLM": "evener_models.phi:PhiForCausalLM",
        "Phi3ForCausalLM": "evener_models.phi3:Phi3ForCausalLM",
        "StableLmForCausalLM": "evener_models.stablelm:StableLmForCausalLM",
        "Starcoder2ForCausalLM": "evener_models.starcoder2:Starcoder2ForCausalLM",
        "DeepseekV2ForCausalLM": "evener_models.deepseek_v2:DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM": "evener_models.deepseek_v3:DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM": "evener_models.deepseek_v3:DeepseekV32ForCausalLM",
        "Gemma2ForCausalLM": "evener_models.gemma:Gemma2ForCausalLM",
        "GemmaForCausalLM": "evener_models.gemma:GemmaForCausalLM",
        "Glm4MoeForCausalLM": "evener_models.glm4_moe:Glm4MoeForCausalLM",
        "GptOssForCausalLM": "evener_models.gpt_oss:GptOssForCausalLM",
        "Llama4ForCausalLM": "evener_models.llama4:Llama4ForCausalLM",
        "Llama4ForConditionalGeneration": "evener_models.llama4:Llama4ForConditionalGeneration",
        "SeedOssForCausalLM": "evener_models.seed_oss:SeedOssForCausalLM",
        "LlamaForCausalLM": "evener_models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "evener_models.mistral:MistralForCausalLM",
        "MptForCausalLM": "evener_models.mpt:MptForCausalLM",
        "MixtralForCausalLM": "evener_models.mixtral:MixtralForCausalLM",
        "Olmo2ForCausalLM": "evener_models.olmo2:Olmo2ForCausalLM",
        "Qwen2MoeForCausalLM": "evener_models.qwen_moe:Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM": "evener_models.qwen_moe:Qwen3MoeForCausalLM",
        "Qwen2ForCausalLM": "evener_models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "evener_models.qwen3:Qwen3ForCausalLM",
        "Qwen3NextForCausalLM": "evener_models.qwen3_next:Qwen3NextForCausalLM",
        "Gemma3ForCausalLM": "evener_models.gemma3:Gemma3ForCausalLM",
    },
    checkpoint_views={
        "gpt_oss_experts": "evener_models.gpt_oss_experts:GptOssExperts",
        "llama4_experts": "evener_models.llama4_experts:Llama4Experts",
    },
    pooling_readers={"sentence_transformers": "evener_models.pooling.reader:read"},
)
