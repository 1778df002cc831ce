"""Structured output, parsers of tool calls and reasoning, drafts, adapters, media in prompts, text embeddings; through
the same hooks as anybody else's.

Torch-free.

=======================  ==================================================================================
module                   holds
=======================  ==================================================================================
``llguidance_grammars``  structured output, with the library llguidance
``xgrammar_grammars``    the same with the library xgrammar
``forced_tokens``        what a grammar leaves no choice about, for drafts
``proposed_tokens``      masks behind proposed tokens, for libraries whose matchers cannot take tokens back
``text_library``         what both share: forbidden tokens on top, and texts without a form
``forbidden_tokens``     sequences of tokens that must not occur
``grammar_texts``        the texts of grammars, as every grammar library reads them
``structural_tags``      structural tags as grammars in the syntax of llguidance
``after_reasoning``      answers with reasoning before them: while the model reasons, any token may come
``reasoning_tokens``     where this reasoning ends, in a model's tokens
``drafting``             speculative decoding: what proposes tokens, and which requests get some
``tools``                parsers of tool calls, a module for each kind of format
``reasoning``            parsers of what a model writes before its answer
``harmony``              both, for the format of gpt-oss
``harmony_messages``     whole texts of that format as messages
``message_reader``       what a parser class implements that can read whole conversations
``json_call``            a call as a JSON object, read while it is written
``text_stream``          text in pieces, in which marks may be cut at any character
=======================  ==================================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor, Option

descriptor = Descriptor(
    name="generation",
    summary="Structured output, parsers of tool calls and reasoning, drafts, adapters, media, vectors, step limits.",
    contracts={"descriptor": 1, "generation": 1},
    grammar_masks={"matchers": "evener_constraints.masks:GrammarMasks.of"},
    grammars={
        "llguidance": "evener_generation.llguidance_grammars:LlguidanceLibrary",
        "xgrammar": "evener_generation.xgrammar_grammars:XgrammarLibrary",
    },
    options={
        "grammars": Option(
            type=str,
            default=None,
            help="What finds which tokens a grammar allows: llguidance, or an installed one, "
            "such as xgrammar. By default the one whose name sorts first.",
        ),
        "step_limit": Option(
            type=str,
            default="measured",
            choices=("measured", "pace"),
            help="What limits the tokens of a server's steps: measured keeps them within infer.step_target, pace makes "
            "them as short as prompts allow.",
        ),
        "step_ratio": Option(
            type=float,
            default=2.0,
            help="With generation.step_limit=pace: how many times as long as a decode step "
            "one with prompt tokens may take. A smaller value makes the time between tokens more even.",
        ),
    },
    drafters={
        "grammar": "evener_generation.drafting.grammar_drafter:GrammarDrafter",
        "ngram": "evener_generation.drafting.ngram_drafter:NgramDrafter",
        "model": "evener_generation.drafting.model_drafter:ModelDrafter",
        "mtp": "evener_generation.drafting.model_drafter:ModelDrafter",
    },
    worker_drafters={"model": "evener_drafts.folder:DraftFolder", "mtp": "evener_drafts.prediction:Prediction"},
    engine_commands={"forks": "evener_forks.commands:ForkCommands"},
    adapters={"lora": "evener_adapters.lora:LoraAdapters"},
    pooling_parts={
        "choose": "evener_pooling.settings:choose_pooling",
        "limits": "evener_pooling.limits:whole_texts",
        "outputs": "evener_pooling.outputs:wanted_rows",
        "pooler": "evener_pooling.pooler:Pooler",
        "rows": "evener_pooling.rows:TokenRows",
        "vectors": "evener_pooling.vectors:TextVectors",
    },
    media_parts={
        "checks": "evener_media.checks:validated_media",
        "planner": "evener_media.planner:MediaPlanner",
        "rows": "evener_media.rows:MediaStore",
    },
    step_limits={"measured": "evener_pacing.measured:measured_steps", "pace": "evener_pacing.pace:paced_steps"},
    draft_policies={"measured": "evener_drafts.opening:MeasuredDrafts"},
    tool_parsers={
        "hermes": "evener_generation.tools.json_calls:Hermes",
        "llama3": "evener_generation.tools.json_calls:Llama3",
        "mistral": "evener_generation.tools.json_calls:Mistral",
        "qwen3_coder": "evener_generation.tools.parameters:Qwen3Coder",
        "glm4": "evener_generation.tools.parameters:Glm4",
        "deepseek_v3": "evener_generation.tools.sections:DeepSeekV3",
        "deepseek_v31": "evener_generation.tools.sections:DeepSeekV31",
        "kimi_k2": "evener_generation.tools.sections:KimiK2",
        "pythonic": "evener_generation.tools.pythonic:Pythonic",
        "harmony": "evener_generation.harmony:HarmonyTools",
    },
    reasoning_parsers={
        "think": "evener_generation.reasoning.tags:Think",
        "bracket_think": "evener_generation.reasoning.tags:BracketThink",
        "harmony": "evener_generation.harmony:HarmonyReasoning",
    },
)
