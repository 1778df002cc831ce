"""The layer for multi-token prediction, beside one made of transformers' parts: transformers drops its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_runner import prompt_of
from family_table import NEXT, V3, Row
from safetensors.torch import load_file, save_file

from evener_conformance.naive.model import NaiveModel, NaiveStep


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


#: What Qwen3-Next calls what DeepSeek V3 has.
APART = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm", "eh_proj": "fc"}


def add_layer(model: Any, folder: Any, apart: bool = False) -> tuple[dict[str, torch.Tensor], Any]:
    """Write a random layer behind the model's own, or ``apart``. Returns its tensors, and the part of it that
    transformers has."""
    config, noise = model.config, torch.Generator().manual_seed(1)
    number, hidden = config.num_hidden_layers, config.hidden_size
    layer = type(model.model.layers[-1])(config, number - 1 if apart else number).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.2 + (parameter.dim() == 1))
    own = {name: 1 + 0.3 * torch.randn(hidden, generator=noise) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj"] = torch.randn(hidden, 2 * hidden, generator=noise) * 0.2
    # Checkpoints repeat both; they are not read.
    if not apart:
        own |= {name: torch.zeros(config.vocab_size, hidden) for name in ("embed_tokens", "shared_head.head")}
    inner = "layers.0." if apart else ""
    tensors = {f"{APART[name] if apart else name}.weight": tensor for name, tensor in own.items()}
    for name, tensor in layer.state_dict().items():
        if name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
            kind = name.rpartition(".")[2]
            for expert, matrix in enumerate(tensor):
                keys = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
                for part, key in zip(matrix.chunk(len(keys)), keys, strict=True):
                    tensors[f"{inner}mlp.experts.{expert}.{key}.weight"] = part.contiguous()
        else:
            tensors[f"{inner}{name}"] = tensor
    stored, prefix = load_file(folder / "model.safetensors"), "mtp" if apart else f"model.layers.{number}"
    save_file({**stored, **{f"{prefix}.{n}": t for n, t in tensors.items()}}, folder / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    return own, layer


FAMILIES = {
    f"{family}, {kind}": (family, changes)
    for family, keys in {
        **dict.fromkeys(
            (V3, "Glm4MoeForCausalLM"),
            ({"num_nextn_predict_layers": 1, "first_k_dense_replace": 1}, {"first_k_dense_replace": 9}),
        ),
        NEXT: ({}, {"mlp_only_layers": [0, 3]}),
    }.items()
    for kind, changes in (("experts", keys[0]), ("dense", {**keys[0], **keys[1]}))
}


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_are_those_of_the_published_layer_also_where_it_goes_on_from_its_own_states(
    case: str, tiny_model: Any, one_thread: None
) -> None:
    family, changes = FAMILIES[case]
    model, folder = tiny_model(Row(family, changes))
    own, layer = add_layer(model, folder, apart=family == NEXT)
    if family == NEXT:  # its norms multiply by 1 + weight
        own = {name: tensor + (tensor.dim() == 1) for name, tensor in own.items()}
    eps = model.config.rms_norm_eps
    ids = prompt_of(model.config.vocab_size)
    text = torch.tensor([ids])
    with torch.no_grad():
        states = model.model(text).last_hidden_state[:, :-1]  # after the last norm
        for more in range(3):  # from its own states
            tokens = model.model.embed_tokens(text)[:, 1:]
            both = norm(tokens, own["enorm"], eps), norm(states, own["hnorm"], eps)
            joined, count = torch.cat(both, -1) @ own["eh_proj"].T, tokens.shape[1]
            positions, mask = torch.arange(count)[None], torch.full((count,) * 2, float("-inf")).triu(1)[None, None]
            angles = model.model.rotary_emb(joined, positions)
            out = layer(joined, attention_mask=mask, position_ids=positions, position_embeddings=angles)
            normed = norm(out[0] if isinstance(out, tuple) else out, own["shared_head.norm"], eps)
            expected = normed @ model.lm_head.weight.T
            states = torch.cat((states, normed[:, -1:]), 1)
            text = torch.cat((text, torch.tensor([[ids[more]]])), 1)

    naive = NaiveModel(folder, predicts=True)
    found = []
    for start, stop in ((0, 5), (5, 6), (6, len(ids) - 1)):  # in steps, so that the layer reads its state
        metas = (None,) * len(naive.build.slots)
        step = NaiveStep(torch.tensor(ids[start:stop], dtype=torch.int32), torch.arange(start, stop), metas=metas)
        hidden = naive.model.forward(step)
        step.token_ids = torch.tensor(ids[start + 1 : stop + 1], dtype=torch.int32)
        states = naive.model.predict(hidden, step)
        found.append(naive.model.predicted(states, step))
    for more in range(2):
        place = torch.tensor([len(ids) - 1 + more])
        step = NaiveStep(torch.tensor([ids[more]], dtype=torch.int32), place, metas=metas)
        states = naive.model.predict(states[-1:], step, own=True)
        found.append(naive.model.predicted(states, step))
    torch.testing.assert_close(torch.cat(found), expected[0], atol=5e-4, rtol=2e-4)
    assert naive.model.predicts and not NaiveModel(folder).model.predicts
