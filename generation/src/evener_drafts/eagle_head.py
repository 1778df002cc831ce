"""The head of EAGLE-3 (Li et al. 2025): a decoder layer that goes on from hidden states of the model that it is for.

It gets the hidden states of one token from three layers of the model, joined and brought to its own width (``fc``), and
the embedding of the token behind that. Both are normed and joined: the input of its attention, which is twice as wide
as its residual stream. It predicts the token behind these two, out of a smaller vocabulary (``d2t`` says which id of
the model each of its own is: the difference). What its layer gives takes the place of the model's hidden states when
it goes on alone.

Two ways of writing ``config.json`` are read: that of the published heads (``LlamaForCausalLMEagle3``; the layer is
called ``midlayer``), and that of the package speculators (``transformer_layer_config``; ``layers.0``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from evener.config.resolve import ResolvedConfig
from evener.contracts.architecture import Architecture, Step
from evener.contracts.checkpoint import Checkpoint
from evener.contracts.device import Device
from evener.contracts.state import AttentionProvider, AttentionSpec, StateSpec, StateTensor
from evener.contracts.weights import AttentionWeights
from evener.distributed.world import RankGroups
from evener.engine.quantized.state import choose_state
from evener.engine.sampling.sampler import Sampler
from evener.engine.worker.assembly import declare_model, view_model
from evener.errors import ConfigError
from evener.layers import Builder, CausalLM, MLPConfig, RotaryConfig
from evener.layers.config_json import activation, read_flag, read_float, read_int, read_object, unsupported
from evener.layers.embedding import Embedding, LMHead
from evener.layers.norms import declare_norm, norm_common
from evener.plugins.load import LoadedPackages
from evener_drafts.draft import DeclaredDraft

_IDS = "eagle_aux_hidden_state_layer_ids"
_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
#: Layers whose hidden states a head may read.
_MOST_LAYERS = 16


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of such a head."""
    names = config.get("architectures")
    named = isinstance(names, list) and any(name in _NAMES for name in names)
    return named or config.get("speculators_model_type") == "eagle3"


def _merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """Both ways of writing as one mapping, without entries that are null."""
    both = {**config, **read_object(config, "transformer_layer_config")}
    return {key: value for key, value in both.items() if value is not None}


class EagleHead(Architecture):
    """The head. Each rank holds it whole.

    Attributes:
        stored: (class) names of the checkpoint's tensors; empty with ``load=dummy``.
        model_vocab, model_hidden: ids and width of the model that it was trained for.
        layers: before which of that model's layers it reads the stream, from 0; None: as the method's authors do.
        ids: int64 [vocab_size], the model's id of each of its own, on the host.
    """

    stored: frozenset[str] = frozenset()

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        build, c = build.replicated(), _merged(config)
        for key in ("attention_bias", "mlp_bias", "norm_before_fc"):
            if read_flag(c, key):
                raise unsupported(c, key, "false, in a head of EAGLE-3")
        if c.get("sliding_window") and read_flag(c, "use_sliding_window", True):
            raise unsupported(c, "sliding_window", "null, in a head of EAGLE-3")
        if read_int({"num_hidden_layers": 1, **c}, "num_hidden_layers") != 1:
            raise unsupported(c, "num_hidden_layers", "1, in a head of EAGLE-3")
        self.hidden_size = hidden = read_int(c, "hidden_size")
        self.model_vocab, self.max_positions = read_int(c, "vocab_size"), build.max_positions
        self.vocab_size = read_int({"draft_vocab_size": self.model_vocab, **c}, "draft_vocab_size")
        self.model_hidden = read_int({"target_hidden_size": hidden, **c}, "target_hidden_size")
        self.layers, self._normed_residual = _read_layers(c), read_flag(c, "norm_before_residual")
        self.ids = torch.arange(self.vocab_size)
        eps, dtype = read_float(c, "rms_norm_eps"), build.dtype
        common = norm_common(build, hidden, eps, 0.0, "rms")
        self.embedding = None
        if "embed_tokens.weight" in self.stored:
            self.embedding = Embedding(build, "embed_tokens.weight", self.model_vocab, hidden)
        width = self.model_hidden * (3 if self.layers is None else len(self.layers))
        self._fc_weight = build.linear("fc", {"fc.weight": hidden}, width)
        self._fc = build.op("linear", "fc", weight=self._fc_weight, rows=hidden, columns=width, dtype=dtype, out=dtype)
        published = not any(name.startswith("layers.") for name in self.stored)
        prefix = "midlayer" if published else "layers.0"
        sizes = {"hidden": hidden, "eps": eps, "offset": 0.0}
        self._token_norm = build.op("rms_norm", f"{prefix}.input_layernorm", dtype=dtype, **sizes)
        self._hidden_norm = build.op("rms_norm", f"{prefix}.hidden_norm", dtype="float32", **sizes)
        self._token_weight = declare_norm(build, f"{prefix}.input_layernorm", hidden, common)
        self._hidden_weight = declare_norm(build, f"{prefix}.hidden_norm", hidden, common, "float32")
        self._declare_attention(c, build, prefix, eps)
        self._mlp, static = MLPConfig(inner=read_int(c, "intermediate_size"), activation=activation(c)).declare(
            build, prefix, common
        )
        self._mlp_block = build.op("mlp_block", f"{prefix}.mlp", **static)
        self._head = LMHead(build, "lm_head.weight", "norm", self.vocab_size, common)
        for pattern in (r"[dt]2[td]", r".*rotary_emb\.inv_freq", r"verifier_.*"):
            build.ignore(pattern)

    def _declare_attention(self, c: Mapping[str, Any], build: Builder, prefix: str, eps: float) -> None:
        heads, hidden, module = read_int(c, "num_attention_heads"), self.hidden_size, f"{prefix}.self_attn"
        kv_heads = read_int({"num_key_value_heads": heads, **c}, "num_key_value_heads")
        if heads % kv_heads:
            raise unsupported(c, "num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
        dim = read_int({"head_dim": hidden // heads, **c}, "head_dim")
        rotary = RotaryConfig.from_config(c, dim)
        parts = {f"{module}.{name}_proj.weight": count * dim
                 for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))}  # fmt: skip
        qkv = build.linear(f"{module}.qkv_proj", parts, 2 * hidden)
        o = build.linear(f"{module}.o_proj", {f"{module}.o_proj.weight": hidden}, heads * dim)
        tensors = tuple(StateTensor(name, (kv_heads, dim), build.dtype) for name in ("key", "value"))
        reads = AttentionSpec(heads, dim, dim**-0.5, dtype=build.dtype)
        self._slot = build.state(module, StateSpec("full", tensors), reads)
        self._attention = build.group(AttentionWeights, norm=None, qkv=qkv, o=o, cos_sin=rotary.table(build, dim))
        wide = norm_common(build, 2 * hidden, eps, 0.0, "rms")
        self._enter = build.op(
            "norm_qkv_rotary_write", module, **wide, heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=dim,
            rotary_dim=rotary.dim, interleaved=rotary.interleaved, qk_norm=False, qk_norm_over="head",
            qk_norm_ranks=None, qkv=qkv, state=self._slot, pre_norm=False,
        )  # fmt: skip
        self._project = build.op("linear", f"{module}.o_proj", weight=o, rows=hidden, columns=heads * dim,
                                 dtype=build.dtype, out=build.dtype)  # fmt: skip

    def join(self, streams: Sequence[torch.Tensor], bucket: int) -> torch.Tensor:
        """Bring the model's hidden states, float32 [T, model_hidden] of each layer, to this width: float32 [T,
        hidden]."""
        weight = self._fc_weight.value
        joined = torch.cat(list(streams), dim=1).to(getattr(torch, self._fc.static["dtype"]))
        return self._fc.table[bucket](joined, weight, None).float()  # type: ignore[no-any-return]

    def extend(self, hidden: torch.Tensor, tokens: torch.Tensor, step: Step) -> torch.Tensor:
        """Run the layer.

        Args:
            hidden: float32 [T, hidden], what ``join`` or this method returned for each token.
            tokens: [T, hidden], embeddings of the tokens behind these.
            step: the positions and the state are those of ``hidden``.

        Returns float32 [T, hidden].
        """
        assert self._token_weight is not None and self._hidden_weight is not None, "these norms have weights"
        w, slot = self._attention.values, self._slot
        normed = self._hidden_norm.table[step.bucket](hidden, self._hidden_weight.value)
        first = self._token_norm.table[step.bucket](tokens, self._token_weight.value)
        meta, both = step.metas[slot.group], torch.cat((first, normed.to(first.dtype)), dim=1)
        query, _ = self._enter.table[step.bucket](
            both, None, step.positions, None, w.qkv, None, None, None, w.cos_sin, slot.views, meta
        )
        provider = cast(AttentionProvider, slot.provider)
        x = self._project.table[step.bucket](provider.attend(slot.views, meta, query).flatten(1), w.o, None)
        # A copy, because the block may overwrite it.
        residual = normed if self._normed_residual else hidden.clone()
        x, residual = self._mlp_block.table[step.bucket](x, residual, self._mlp.values)
        return x + residual  # type: ignore[no-any-return]

    def forward(self, step: Step) -> torch.Tensor:
        raise NotImplementedError("a head goes on from a model's hidden states: call extend()")

    def logits(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Logits float32 [R, vocab_size] of the next token, for rows of what ``extend`` returned."""
        return self._head(hidden, step)


def _read_layers(c: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Layers before which the stream is read. At the top level a number says that; in ``eagle_config`` it is that of
    the layer before."""
    inner = read_object(c, "eagle_config").get(_IDS)
    found = c.get(_IDS, inner)
    if found is None:
        return None
    if not isinstance(found, list) or not 0 < len(found) <= _MOST_LAYERS or any(type(id) is not int for id in found):
        raise unsupported({_IDS: str(found)[:100]}, _IDS, f"a list of up to {_MOST_LAYERS} numbers of layers")
    return tuple(id + (_IDS not in c) for id in found)


def declare_eagle(
    config: ResolvedConfig, loaded: LoadedPackages, device: Device, ranks: RankGroups, model: Architecture,
    checkpoint: Checkpoint,
) -> DeclaredDraft:  # fmt: skip
    """As ``declare_draft``, for the checkpoint of a head."""
    said = f"infer.draft_model={config.config.infer.draft_model}"
    if not isinstance(model, CausalLM) or model.embedding is None:
        raise ConfigError(f"{said} is a head of EAGLE-3, which needs a model whose layers are a stack "
                          f"(evener.layers.CausalLM), and this one is not; leave it out")  # fmt: skip
    stored = view_model(config, loaded, ranks, checkpoint, EagleHead, draft=True)
    family: Any = type("StoredHead", (EagleHead,), {"stored": frozenset(stored.headers)})
    state = replace(config.config.infer, kv_dtype="auto", kv_scales=None, layers=())
    alone = replace(config, config=replace(config.config, infer=state))
    own, head = declare_model(alone, ranks, stored._replace(family=family))
    assert isinstance(head, EagleHead), "it was declared"
    wants, has = (head.model_hidden, head.model_vocab), (model.hidden_size, model.vocab_size)
    if wants != has:
        raise ConfigError(
            f"{said} was trained for a model with a hidden size of {wants[0]} and {wants[1]} token ids, "
            f"and this one has {has[0]} and {has[1]}; take a head for this one, or leave it out"
        )
    if head.embedding is None and head.hidden_size != model.hidden_size:
        raise ConfigError(f"{said} has no embed_tokens.weight, and with a hidden size of {head.hidden_size} it cannot "
                          f"read the model's embedding, which has {model.hidden_size}; fetch it again")  # fmt: skip
    count = len(model.stack.layers)
    head.layers = head.layers or (2, count // 2, count - 3)
    if not all(0 <= layer < count for layer in head.layers):
        raise ConfigError(f"{said} reads the hidden states before layers {list(head.layers)}, and the model has layers "
                          f"0 to {count - 1}; take a head for this model, or leave it out")  # fmt: skip
    if stored.headers:
        head.ids = _model_ids(stored.checkpoint, head, said)
    choose_state([own], state, stored.checkpoint, stored.headers, device, loaded)
    for site in own.sites:
        site.path = f"draft head: {site.path}"  # in the manifest
    return DeclaredDraft(stored, own, head, Sampler(own, head.vocab_size))


def _model_ids(checkpoint: Checkpoint, head: EagleHead, said: str) -> torch.Tensor:
    """The model's id of each id of the head, from ``d2t``.

    Raises:
        ConfigError: it is missing, of another size, or names ids that the model lacks.
    """
    own = torch.arange(head.vocab_size)
    header = checkpoint.headers.get("d2t")
    if header is None:
        if head.vocab_size != head.model_vocab:
            raise ConfigError(f"{said} has {head.vocab_size} of the model's {head.model_vocab} token ids, and no d2t "
                              "that says which; fetch it again")  # fmt: skip
        return own
    if tuple(header[1]) != (head.vocab_size,):
        raise ConfigError(f"{said} has a d2t of shape {list(header[1])} for {head.vocab_size} ids; fetch it again")
    ids = own + checkpoint.tensor("d2t").to(torch.int64)
    if not bool(((ids >= 0) & (ids < head.model_vocab)).all()):
        raise ConfigError(f"{said} has a d2t that leads to ids outside the model's {head.model_vocab}; fetch it again")
    return ids
