"""What an engine tells its front end when it is ready. Torch-free plain data, so that it crosses processes."""

from __future__ import annotations

import msgspec

from evener.config.resolve import ResolvedValue
from evener.contracts.adapters import AdapterLimits
from evener.contracts.pooling import PoolingSettings
from evener.engine.facts.manifest_report import ManifestReport
from evener.engine.facts.memory_plan import MeasuredMemory


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank.

    Attributes:
        device: the device's name.
        backend: the backend in use.
        memory: the memory plan and what was measured.
        layers: the number of its first layer, and of the one after its last.
    """

    device: str
    backend: str
    memory: MeasuredMemory
    layers: tuple[int, int] = (0, 0)


class EngineInfo(RankInfo, frozen=True, kw_only=True):
    """The model, the limits and the choices of a running engine. The fields of ``RankInfo`` are those of rank 0.

    Attributes:
        model: path of the checkpoint.
        served_name: the model's name in the API.
        architecture: the model's architecture, as its package registers it; None if the engine does not say.
        pooling: how it embeds or scores texts; None: it generates text.
        max_reqs: requests that run at a time.
        max_model_len: tokens that a prompt and its output may have together.
        vocab_size: token ids are below it.
        hidden_size: width of the embeddings; media given as rows must have it.
        media_rows: embedding rows of media that one engine step takes.
        final_norm: whether it gives hidden states after its final norm (``Architecture.normed``).
        encoders: kinds of media that the model encodes itself ("image"), sorted.
        adapters: which adapters (LoRA) it takes; None: none.
        backend_version, backend_reason: of the backend in use, and why it was chosen.
        dtype: the compute dtype, torch's name.
        start_seconds: how long the worker took to start, in seconds.
        config: every key, as in ``"infer.step_tokens"``, with its value and the reason for it. See ``setting``.
        manifest: who computes each op, and why.
        ranks: one entry a rank, rank 0 first; empty with a single rank.
    """

    model: str
    served_name: str
    max_model_len: int
    vocab_size: int
    backend_reason: str
    architecture: str | None = None
    pooling: PoolingSettings | None = None
    max_reqs: int = 0
    hidden_size: int = 0
    media_rows: int = 1
    final_norm: bool = True
    encoders: list[str] = []
    adapters: AdapterLimits | None = None
    backend_version: str = ""
    dtype: str = ""
    start_seconds: float = 0.0
    config: dict[str, ResolvedValue] = {}
    manifest: ManifestReport = ManifestReport()
    ranks: list[RankInfo] = []

    def setting(self, key: str) -> ResolvedValue:
        """The value of a key, and its reason; None and "" for a key of a package that is not installed."""
        return self.config.get(key) or ResolvedValue(None, "")
