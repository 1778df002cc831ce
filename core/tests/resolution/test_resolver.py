"""The resolver by itself: who is chosen, who is refused and why, for each call site and bucket."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Bucket, Kernel, OpCall, OpFunction
from evener.contracts.quant import PackedWeight, Packing, WeightPart
from evener.contracts.state import LatentProvider, StateProvider
from evener.engine.facts.manifest_report import ManifestReport, OpChoice, Refusal
from evener.errors import PluginError, ResolveError, UnknownNameError
from evener.layers.builder import Builder
from evener.ops.reference.linear import PLAIN, PlainPacking
from evener.ops.reference.state import PlainPages, ReferenceState
from evener.ops.schemas import BUILTIN
from evener.plugins.catalog import Provided
from evener.resolution.buckets import bucket_index, capture_sizes, token_buckets
from evener.resolution.candidates import Candidates
from evener.resolution.resolver import Resolver
from evener_conformance.naive.model import find_architecture

BUCKETS = token_buckets(16)


class Tiled(PlainPacking):
    layout = "tiled"


class Odd(Packing):
    """Cannot hold anything."""

    layout = "odd"

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        return "wants a multiple of 1000 rows"

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        raise AssertionError("it was refused")

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        raise AssertionError("it was refused")


class Fast(Kernel):
    """A kernel for any op that serves some token counts."""

    def __init__(self, op: str, name: str = "fast", low: int = 1, high: int = 10**9, **attributes: Any) -> None:
        self.op, self.name, self._low, self._high = op, name, low, high
        self.built: list[Bucket] = []
        for key, value in attributes.items():
            setattr(self, key, value)

    def supports(self, call: OpCall) -> str | None:
        fits = self._low <= call.bucket.low and call.bucket.high <= self._high
        return None if fits else f"serves {self._low} to {self._high} tokens"

    def build(self, call: OpCall) -> OpFunction:
        self.built.append(call.bucket)
        return lambda *args: (self, *args)


class Picky(ReferenceState):
    """A state provider that refuses, or serves under another layout's name."""

    def __init__(
        self, name: str, reason: str | None = None, priority: int = 5, kinds: Sequence[str] = ("full", "window")
    ) -> None:
        self.name = self.layout = name
        self.priority, self.kinds, self._reason = priority, frozenset(kinds), reason

    def supports(self, *_: Any) -> str | None:
        return self._reason


class DenseLatent(PlainPages, LatentProvider):
    name = layout = "dense"
    kinds = frozenset({"latent"})
    prepare, write, attend = ReferenceState.prepare, ReferenceState.write, ReferenceState.attend
    pieces, supports = ReferenceState.pieces, ReferenceState.supports
    priority = 5


def test_a_provider_without_the_interface_for_sparse_attention_is_passed_over() -> None:
    resolver, build = resolved(family="DeepseekV32", states=[DenseLatent()])
    [slot, *_] = [s for s in build.slots if s.attention.top is not None and s.spec.kind == "latent"]
    assert isinstance(slot.provider, ReferenceState)
    refused = {
        reason for choice in resolver.manifest.choices if choice.path == slot.name for _, reason in choice.refused
    }
    assert refused == {"is no SparseLatentProvider"}


def available(kernels: Sequence[Kernel] = (), states: Sequence[StateProvider] = (), **fields: Any) -> Candidates:
    return Candidates(
        **{
            "schemas": {s.name: s for s in BUILTIN},
            "kernels": [Provided(k, vars(k).get("package", "acme"), "acme", "1.2") for k in kernels],
            "states": [Provided(s, "acme", "acme", "1.2") for s in states],
            "reference_state": ReferenceState(),
            "reference_packing": PLAIN,
            "device": DeviceCapabilities(),
            "buckets": BUCKETS,
            "version": "0.1",
            **fields,
        }
    )


def resolved(
    *kernels: Kernel, family: str = "Llama", states: Sequence[StateProvider] = (), **fields: Any
) -> tuple[Resolver, Builder]:
    build = Builder("float32", 64)
    cls = find_architecture(f"{family}ForCausalLM")
    cls(cls.tiny_config(), build)
    resolver = Resolver(available(kernels, states, **fields))
    resolver.states(build.slots)
    resolver.packings([w for w in build.weights if isinstance(w, LinearWeight)])
    resolver.sites(build.sites)
    return resolver, build


def rows(resolver: Resolver, op: str) -> list[OpChoice]:
    return [row for row in ManifestReport.of(resolver.manifest).ops if row.op == op]


def test_every_token_count_falls_into_its_bucket() -> None:
    buckets = token_buckets(100)
    assert [str(b) for b in buckets] == ["1", "2", "3..4", "5..8", "9..16", "17..32", "33..64", "65..100"]
    for tokens in range(1, 101):
        bucket = buckets[bucket_index(tokens)]
        assert bucket.low <= tokens <= bucket.high


def test_without_kernels_every_primitive_is_the_reference_and_every_composite_is_expanded() -> None:
    resolver, build = resolved()
    assert {c.provider for c in resolver.manifest.choices} == {"reference", "expanded"}
    assert {c.op for c in resolver.manifest.choices if c.provider == "expanded"} == {
        "decoder_layer",
        "attention_block",
        "norm_qkv_rotary_write",
        "mlp_block",
        "head",
        "vocab_greedy",
    }
    assert "linear" in ManifestReport.of(resolver.manifest).fallbacks
    assert all(len(site.table) == len(BUCKETS) for site in build.sites)


def test_a_kernel_that_serves_some_buckets_leaves_the_rest_to_the_reference_and_the_manifest_says_why() -> None:
    kernel = Fast("rotary", high=4)
    resolver, _ = resolved(kernel)
    ours, rest = rows(resolver, "rotary")
    assert (ours.provider, ours.version, ours.buckets, ours.refused) == (
        "acme/fast",
        "1.2",
        ["1", "2", "3..4"],
        [],
    )
    assert (rest.provider, rest.version, rest.buckets) == ("reference", "0.1", ["5..8", "9..16"])
    assert rest.refused == [Refusal("acme/fast", "serves 1 to 4 tokens")]
    assert ours.sites == rest.sites == 3 and set(kernel.built) == set(BUCKETS[:3])


def test_a_kernel_must_serve_the_whole_bucket() -> None:
    resolver, _ = resolved(Fast("rotary", high=7))
    assert [row.buckets for row in rows(resolver, "rotary")] == [["1", "2", "3..4"], ["5..8", "9..16"]]


def test_the_highest_priority_that_fits_wins_a_bucket_and_a_tie_goes_to_the_name_that_sorts_first() -> None:
    few, many = Fast("rotary", "few", high=2, priority=9), Fast("rotary", "many", low=9, priority=9)
    zeta, alpha = Fast("rotary", "zeta"), Fast("rotary", "alpha")
    resolver, _ = resolved(zeta, many, alpha, few)
    found = {tuple(row.buckets): row.provider for row in rows(resolver, "rotary")}
    assert found == {("1", "2"): "acme/few", ("3..4", "5..8"): "acme/alpha", ("9..16",): "acme/many"}


def test_a_kernel_for_a_composite_is_used_at_every_site_and_its_parts_are_not_resolved() -> None:
    kernel = Fast("decoder_layer")
    resolver, build = resolved(kernel)
    assert len(kernel.built) == 3 * len(BUCKETS)
    assert not rows(resolver, "rotary") and not rows(resolver, "mlp_block")
    layers = [site for site in build.sites if site.op == "decoder_layer"]
    assert all(call(1)[0] is kernel for site in layers for call in site.table)


def test_a_fused_kernel_is_a_candidate_only_where_its_state_layout_won() -> None:
    fused = Fast("norm_qkv_rotary_write", state_layout="acme.paged")
    (refused,) = rows(resolved(fused)[0], "norm_qkv_rotary_write")
    assert refused.provider == "expanded"
    assert refused.refused == [
        Refusal("acme/fast", "is written for state layout 'acme.paged', but 'reference' was chosen")
    ]
    (taken,) = rows(resolved(fused, states=[Picky("acme.paged")])[0], "norm_qkv_rotary_write")
    assert taken.provider == "acme/fast"


def test_a_layout_is_chosen_when_kernels_read_it_in_every_bucket() -> None:
    small, large = (
        Fast("linear", "small", high=4, packings=(Tiled(),)),
        Fast("linear", "large", low=5, packings=(Tiled(),)),
    )
    resolver, build = resolved(small, large)
    assert set(resolver.manifest.packings.values()) == {"tiled"}
    assert {w.layout for w in build.weights if isinstance(w, LinearWeight)} == {"tiled"}
    assert "reference" not in {row.provider for row in rows(resolver, "linear")}


def test_a_layout_that_one_bucket_cannot_read_is_not_chosen() -> None:
    resolver, _ = resolved(Fast("linear", high=4, packings=(Tiled(),)))
    assert set(resolver.manifest.packings.values()) == {"plain"}
    assert all(row.provider == "reference" for row in rows(resolver, "linear"))
    assert {r.reason for row in rows(resolver, "linear") for r in row.refused} == {
        "does not read weight in layout 'plain'"
    }


def test_a_kernel_that_also_reads_the_plain_layout_serves_its_buckets_beside_the_reference() -> None:
    resolver, _ = resolved(Fast("linear", high=4, packings=(Tiled(), PLAIN)))
    assert set(resolver.manifest.packings.values()) == {"plain"}
    assert {row.provider for row in rows(resolver, "linear")} == {"acme/fast", "reference"}


def test_a_packing_that_cannot_hold_the_weight_is_skipped() -> None:
    resolver, _ = resolved(Fast("linear", packings=(Odd(), Tiled())))
    assert set(resolver.manifest.packings.values()) == {"tiled"}


def test_a_weight_that_no_packing_can_hold_is_an_error_with_every_reason() -> None:
    with pytest.raises(
        ResolveError, match=r"hold .*qkv_proj for compute in float32 \(odd: wants a multiple of 1000 rows\)"
    ):
        resolved(Fast("linear", packings=(Odd(),)), reference_packing=Odd())


def test_the_best_state_provider_that_supports_a_group_gets_it_as_a_unit() -> None:
    best, good = Picky("best", "no head_dim of 22", 9), Picky("good", None, 5, ["full"])
    resolver, build = resolved(family="Gemma3", states=[good, best])
    assert [slot.provider.name for slot in build.slots if slot.provider] == ["reference"] * 3 + ["good"]
    reasons = {row.provider: [r.reason for r in row.refused] for row in rows(resolver, "attention")}
    assert reasons == {
        "acme/good": ["no head_dim of 22"],
        "reference": ["no head_dim of 22", "does not serve state of kind 'window'"],
    }


def test_state_of_an_unserved_kind_is_an_error_with_the_reasons() -> None:
    class Nothing(ReferenceState):
        kinds = frozenset()

    with pytest.raises(ResolveError, match=r"serves state of kind 'full' \(acme/best: too wide\)"):
        resolved(states=[Picky("best", "too wide")], reference_state=Nothing())


@pytest.mark.parametrize("wanted", ["slow", "acme", "acme/slow"])
def test_a_forced_provider_is_used_though_another_has_priority(wanted: str) -> None:
    kernels = [Fast("rotary", "slow"), Fast("rotary", "rapid", priority=9, package="other"), Fast("rms_norm", "quick")]
    resolver, _ = resolved(*kernels, forced={"rotary": wanted})
    assert [row.provider for row in rows(resolver, "rotary")] == ["acme/slow"]
    assert [row.provider for row in rows(resolver, "rms_norm")] == ["acme/quick"]


def test_a_forced_name_keeps_the_others_out_and_the_manifest_names_the_option() -> None:
    resolver, _ = resolved(Fast("rotary", "a", priority=9), Fast("rotary", "b"), forced={"rotary": "b"})
    (row,) = rows(resolver, "rotary")
    assert row.provider == "acme/b" and row.refused == [Refusal("acme/a", "ops.rotary=b")]
    resolver, _ = resolved(
        Fast("rotary"), states=[Picky("best")], forced={"rotary": "reference", "attention": "reference"}
    )
    assert rows(resolver, "rotary")[0].provider == rows(resolver, "attention")[0].provider == "reference"
    assert rows(resolver, "attention")[0].refused == [Refusal("acme/best", "ops.attention=reference")]


def test_a_forced_state_provider_that_refuses_is_an_error_with_its_reason_and_no_silent_fallback() -> None:
    with pytest.raises(ResolveError, match=r"ops\.attention=best was asked for; acme/best: pip install best; or"):
        resolved(states=[Picky("best", "pip install best"), Picky("good")], forced={"attention": "best"})


def test_of_a_forced_packages_state_providers_the_best_that_does_not_refuse_is_used() -> None:
    states = [Picky("best", "for another chip", 9), Picky("good", None, 1)]
    resolver, build = resolved(states=states, forced={"attention": "acme"})
    assert {slot.provider.name for slot in build.slots if slot.provider} == {"good"}
    assert rows(resolver, "attention")[0].refused == [Refusal("acme/best", "for another chip")]
    with pytest.raises(ResolveError, match=r"asked for; acme/best: for another chip; acme/good: too wide; or"):
        resolved(states=[states[0], Picky("good", "too wide", 1)], forced={"attention": "acme"})


def test_forcing_a_state_provider_affects_only_the_kinds_of_state_that_it_serves() -> None:
    states = [Picky("narrow", None, 5, ["full"]), Picky("wide", None, 1)]
    resolver, build = resolved(family="Gemma3", states=states, forced={"attention": "narrow"})
    assert [slot.provider.name for slot in build.slots if slot.provider] == ["wide"] * 3 + ["narrow"]
    assert Refusal("acme/narrow", "does not serve state of kind 'window'") in [
        refused for row in rows(resolver, "attention") for refused in row.refused
    ]


@pytest.mark.parametrize(
    ("forced", "words"),
    [
        ({"rotory": "reference"}, ["unknown op 'rotory'", "'rotary'"]),
        ({"rotary": "acne"}, ["unknown provider of rotary 'acne'", "'acme'", "ops.rotary=reference"]),
        ({"attention": "bst"}, ["unknown provider of attention 'bst'", "'best'"]),
    ],
)
def test_a_forced_name_that_does_not_exist_is_an_error_that_lists_the_known_names(
    forced: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(UnknownNameError) as error:
        resolved(Fast("rotary"), states=[Picky("best")], forced=forced)
    assert all(word in str(error.value) for word in words)


def test_an_unknown_op_is_an_error_that_names_the_call_site() -> None:
    build = Builder("float32", 64)
    build.op("rms_nrom", "model.norm", hidden=4)
    with pytest.raises(UnknownNameError, match=r"op 'rms_nrom'; did you mean 'rms_norm'\?.*model\.norm"):
        Resolver(available()).sites(build.sites)


def test_without_fallbacks_allowed_an_op_that_only_the_reference_serves_is_an_error_with_its_buckets() -> None:
    with pytest.raises(ResolveError) as error:
        resolved(
            Fast("decoder_layer", high=8), Fast("head"), Fast("embedding"), states=[Picky("best")], max_fallback="none"
        )
    message = str(error.value)
    assert "rotary (at 9..16 tokens)" in message and "--max-fallback any" in message


def test_max_fallback_none_accepts_a_model_whose_ops_all_have_kernels() -> None:
    kernels = Fast("decoder_layer"), Fast("head"), Fast("greedy"), Fast("embedding")
    resolver, _ = resolved(*kernels, states=[Picky("best")], max_fallback="none")
    assert not resolver.manifest.fallbacks()


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, (1,)), (20, (1, 2, 4, 8, 16, 20)), (64, (1, 2, 4, 8, 16, 24, 32, 48, 64))]
)
def test_capture_sizes_are_bucket_ends_and_midpoints_of_large_buckets(largest: int, sizes: tuple[int, ...]) -> None:
    assert capture_sizes(largest) == sizes


@pytest.mark.parametrize("step", ["supports", "build", "workspace"])
def test_a_kernel_that_raises_is_named_with_what_runs_without_it(step: str) -> None:
    def tangled(call: OpCall) -> None:
        raise RuntimeError("knot tangled")

    kernel = Fast("rms_norm", "knots")
    setattr(kernel, step, tangled)
    with pytest.raises(PluginError, match=r"kernel acme/knots 1\.2 raised RuntimeError: knot tangled; ops\.rms_norm"):
        resolved(kernel)


def raise_at(line: int) -> None:
    raise RuntimeError(f"knot {line} tangled")


class Callable:
    """What a kernel may build beside a function."""

    def __call__(self, *rows: Any) -> None:
        raise_at(3)


@pytest.mark.parametrize(
    "built",
    [lambda *rows: raise_at(1), partial(raise_at), Callable(), torch.inference_mode()(lambda *rows: raise_at(4))],
    ids=["function", "partial", "object", "decorated"],
)
def test_an_error_in_a_step_is_attributed_to_the_kernel_that_built_it(built: Any) -> None:
    kernel = Fast("rms_norm", "knots")
    kernel.build = lambda call: built  # type: ignore[method-assign]
    resolver, _ = resolved(kernel)
    norm = resolver.resolve(
        "rms_norm", "here", {"hidden": 8, "dtype": "float32", "eps": 0.0, "offset": 0.0}, BUCKETS[0]
    )
    with pytest.raises(RuntimeError) as error:
        norm(2)
    where = rf"ops\.rms_norm=reference runs without it; it happened at {__file__}:\d+, in a step"
    with pytest.raises(PluginError, match=rf"kernel acme/knots 1\.2 raised RuntimeError: knot \d tangled; {where}"):
        resolver.attribution.raise_attributed(error.value)


def test_an_error_in_an_inherited_method_is_attributed_to_the_state_provider() -> None:
    best = Picky("best")
    resolver, _ = resolved(states=[best])
    with pytest.raises(AttributeError) as error:
        best.attend(*[None] * 3)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"state provider acme/best 1\.2 raised \w+: .*; ops\.attention=reference"):
        resolver.attribution.raise_attributed(error.value)


def test_an_error_outside_kernels_is_not_attributed() -> None:
    resolver, _ = resolved(Fast("rms_norm", "knots"))
    with pytest.raises(RuntimeError) as error:
        raise_at(5)
    resolver.attribution.raise_attributed(error.value)


def test_an_unknown_graph_support_value_raises_and_lists_the_known_ones() -> None:
    class Misspelt(ReferenceState):
        name, graph = "beads", "decoed"  # type: ignore[assignment]

    with pytest.raises(ResolveError, match=r"beads .*: graph='decoed' is none of never, uniform_decode, any"):
        Resolver(available(states=[Misspelt()]))


@pytest.mark.parametrize("said", [True, False, "", 3])
def test_supports_returning_neither_none_nor_str_raises_with_file_and_line(said: Any) -> None:
    class Wrong(Fast):
        def supports(self, call: OpCall) -> str | None:
            return said  # type: ignore[no-any-return]

    with pytest.raises(PluginError) as raised:
        resolved(Wrong("rotary"))
    assert f"Wrong ({__file__}:{inspect.getsourcelines(Wrong)[1]}): supports returned {said!r}; return None to " \
           "accept, or a str with the reason to refuse" in str(raised.value)  # fmt: skip


def test_the_footprint_names_the_kernel_and_bucket_with_the_largest_scratch() -> None:
    class Greedy(Fast):
        def workspace(self, call: OpCall) -> int:
            return 100 * call.bucket.high

    resolver, _ = resolved(Greedy("rotary"), Fast("linear"))
    assert (resolver.footprint.workspace, resolver.footprint.workspace_owner) == (1600, "acme/fast at 9..16 tokens")
