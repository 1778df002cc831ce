"""The documents say what the source says: generated pages are fresh, links and paths lead somewhere, rows are whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from docs_blocks import DOCS, documents
from docs_from_source import module_text
from generate_docs import CONTRACTS, generated
from source_tree import ROOT

from evener.contracts.descriptor import Descriptor, Option
from evener.ops.schemas import BUILTIN
from evener.plugins.hook_check import HOOK_ARGUMENTS

_LINK = re.compile(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)")
_FOLDERS = (r"core|formats|generation|models|inspection|offload|deploy|conformance|server|backends|tests|scripts"
            r"|benchmarks|docs|\.ci")  # fmt: skip
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", list(generated()), ids=lambda path: path.name)
def test_a_generated_page_is_what_the_source_gives(path: Path) -> None:
    assert path.read_text("utf-8") == generated()[path], f"{path.name} is stale; type: make docs"


def test_every_hook_field_and_op_stands_in_the_reference() -> None:
    text = (DOCS / "contracts.md").read_text("utf-8")
    for name, arguments in HOOK_ARGUMENTS.items():
        heading = next(line for line in text.splitlines() if line.startswith(f"### `{name}("))
        assert all(f"{argument}:" in heading for argument in arguments), heading
    fields = [*Descriptor.__dataclass_fields__, *Option.__dataclass_fields__]
    assert [field for field in fields if f"- `{field}`: " not in text] == []
    assert [schema.name for schema in BUILTIN if f"#### `{schema.name}`" not in text] == []


def test_required_and_optional_methods_look_different() -> None:
    text = module_text(CONTRACTS / "device.py")
    assert "- **required** `readback(tensor: torch.Tensor) -> Readback`" in text
    assert "- (optional) `new_stream() -> Any`" in text


def test_the_parameters_that_the_server_takes_are_those_on_the_page() -> None:
    from evener_server.embeddings import EmbeddingBody
    from evener_server.protocol import ChatBody, CompletionBody, GenerationBody, PromptBody, TokenOutputs
    from evener_server.scores import PairBody, RerankBody, ScoreBody

    def taken(kind: type[PromptBody]) -> set[str]:
        # ``Any`` marks fields that are understood and refused.
        return {name for name, field in kind.model_fields.items() if field.annotation is not Any}

    shared, of_tokens = taken(GenerationBody), taken(TokenOutputs)
    bodies = {
        "GenerationBody": shared,
        "TokenOutputs": of_tokens - shared,
        "ChatBody": taken(ChatBody) - of_tokens,
        "CompletionBody": taken(CompletionBody) - of_tokens,
        "EmbeddingBody": taken(EmbeddingBody) - taken(PromptBody),
        "PairBody": taken(PairBody) - taken(PromptBody),
        "RerankBody": taken(RerankBody) - taken(PairBody),
        "ScoreBody": taken(ScoreBody) - taken(PairBody),
    }
    text = (DOCS / "api.md").read_text("utf-8")
    for body, fields in bodies.items():
        shown = text.split(f"<!-- parameters: {body} -->")[1].split("\n\n")[0]
        assert set(re.findall(r"^\| `(\w+)` \|", shown, re.MULTILINE)) == fields, body


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = [line.lstrip("#").strip() for line in text.splitlines() if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_every_link_inside_the_repository_leads_somewhere(path: Path) -> None:
    broken = []
    for link in _LINK.findall(_CODE.sub("", path.read_text("utf-8"))):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


NAME_PROOFS = ("features.md", "support.md", "performance.md", "architecture.md", "backend-author.md",
               "../CONTRIBUTING.md", *(f"lab/{path.name}" for path in (DOCS / "lab").glob("*.md")))  # fmt: skip


@pytest.mark.parametrize("name", NAME_PROOFS)
def test_every_path_that_a_page_names_as_proof_exists(name: str) -> None:
    text = (DOCS / name).read_text("utf-8")
    paths = re.findall(rf"`((?:{_FOLDERS})/[\w./*-]*)`", text)
    assert [path for path in paths if not list(ROOT.glob(path.rstrip("/")))] == []


#: Every id of the list of features, in the order of the page; ids that stand together share a row.
FEATURES = """
C1 G1 K8, C2, C3, C4 K22, C5, E1,
C6 C7 C13, C16 K11, C17 K6 K7, C18, K4, K13 K14, K24, C8, C20 K21 G10, K15, G8 G9, K12, E2, C33,
C9 K5 C10 C11, C12 K16 G7, C19 K18, C31, G5, E3,
C29, K9, G2, K23, E4,
K3, C14, K19, C23, K20 G3, G11, C-q, K25, C27,
C15, G6, G12, E5, K2, K17, C21 C24 C26,
E6, E7, E8, E9, E10, E12, E13, E11, E14, E15, E16, E17, E18, E19, E20, E21, E22
"""


def test_each_feature_has_one_row_with_a_state_and_a_done_one_names_its_test() -> None:
    lines = (DOCS / "features.md").read_text("utf-8").splitlines()
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("| ")]
    rows = [row for row in cells if row[0] not in ("id", "---")]
    assert [row[0] for row in rows] == [ids.strip() for ids in FEATURES.split(",")]
    for ids, _, state, where, test, verified in rows:
        assert re.match(r"(done|not built)\b|partly: ", state), ids
        if state.startswith("done"):
            assert where and test.startswith("test `") and verified, ids
        if state.startswith("partly"):
            assert where, ids


def test_the_weights_that_a_model_declares_have_the_names_on_the_page() -> None:
    from evener.contracts.declared import LinearWeight, Weight
    from evener.layers import Builder, CausalLM
    from evener_models.qwen3 import Qwen3ForCausalLM

    text = (DOCS / "model-author.md").read_text("utf-8")
    build = Builder("float32", 64)
    Qwen3ForCausalLM({**Qwen3ForCausalLM.tiny_config(), "attention_bias": True, "tie_word_embeddings": False}, build)
    names = {name for weight in build.weights if isinstance(weight, Weight) for name in weight.sources}
    names |= {part.name for weight in build.weights if isinstance(weight, LinearWeight) for part in weight.parts}
    last = {re.sub(r"\.\d+\.", ".<i>.", name).rsplit(".", 1)[0].split(".")[-1] for name in names}
    assert {name for name in last if f"{name}.weight`" not in text and f"`{name}`" not in text} == set()
    assert {name for name in names if "layers." not in name and f"`{name}`" not in text} == set()
    for name in ("embedding_scale", "logit_cap", "tied", "norm_offset"):
        assert hasattr(CausalLM, name) and f"`{name}`" in text
    for name in re.findall(r"`build\.(\w+)", text):
        assert hasattr(build, name), name
