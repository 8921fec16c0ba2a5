"""What vLLM sees: its connector interface, each call passed to one of the two halves. Nothing is decided here.

Signatures and their meaning: vLLM's ``KVConnectorBase_V1`` (0.32); ``tests/engines`` compares them with the installed
one.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from polarkv_client.connectors.guard import attach, complaints, harmless
from polarkv_client.connectors.identity import Adapters
from polarkv_client.connectors.settings import load_connector_config
from polarkv_client.connectors.vllm import facts
from polarkv_client.connectors.vllm.copies import Staged, choose
from polarkv_client.connectors.vllm.meter import Meter
from polarkv_client.connectors.vllm.metrics import PolarKVPromMetrics, PolarKVStats
from polarkv_client.connectors.vllm.pages import Pages
from polarkv_client.connectors.vllm.plan import RankIdentity, StepPlan
from polarkv_client.connectors.vllm.scheduler import SchedulerSide
from polarkv_client.connectors.vllm.worker import WorkerSide
from polarkv_client.states import Tier

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_SOURCES = {Tier.MEMORY: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}
_NO_PLAN = StepPlan()


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's plan on its way to the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's identity on its way to the scheduler."""

    identity: RankIdentity


class PolarKVConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Loads and stores the KV of prompts in a PolarKV cache.

    Not ``SupportsHMA``: vLLM then keeps one group of blocks for all layers, which is what is handled here.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ConfigurationError: a setting is wrong, or the engine's layout is not supported; names the fix."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._identity: RankIdentity | None = None
        self._meter = Meter()
        self._defects = complaints.count
        self._config = load_connector_config(self._kv_transfer_config.kv_connector_extra_config)
        if self._config is None:
            return
        _log_as_vllm()
        facts.check_model(vllm_config)
        self._blocks = facts.read_blocks(kv_cache_config)
        facts.check(self._config, vllm_config, self._blocks)
        self._operations = attach(self._config)
        if role == KVConnectorRole.SCHEDULER:
            extras = partial(facts.request_extras, Adapters(), facts.images_are_hashed(vllm_config))
            self._scheduler = SchedulerSide(
                self._config, self._operations, self._blocks.tokens, facts.ranks(vllm_config), extras, self._meter.note
            )  # fmt: skip

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that was dropped is a later miss."""
        return False

    # The workers' half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ConfigurationError: the layout is not understood."""
        if self._config is None:
            return
        pages = Pages(kv_caches, self._blocks.count, self._blocks.page_bytes)
        self._identity, writes = facts.identify(self._config, self._vllm_config, self._blocks, pages)
        per_chunk = self._config.chunk_tokens // self._blocks.tokens
        self._copies = choose(pages, per_chunk, self._config.local_cache_bytes)
        self._worker = WorkerSide(
            self._config, self._operations, self._copies, self._identity.rank, writes, per_chunk,
            self._identity.chunk_bytes, self._meter.note,
        )  # fmt: skip

    def get_handshake_metadata(self) -> Handshake | None:
        return None if self._identity is None else Handshake(self._identity)

    @harmless(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        plan = _plan_of(kv_connector_metadata)
        if self._worker is not None and plan.preempted:
            self._worker.preempt(plan.preempted)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Stores begin here: what they read was computed in earlier steps, and moves while this one computes."""
        super().bind_connector_metadata(connector_metadata)
        self._begin_stores(_plan_of(connector_metadata))

    @harmless(lambda: None)
    def _begin_stores(self, plan: StepPlan) -> None:
        if self._worker is not None and (plan.stores or plan.finished):
            if isinstance(self._copies, Staged):
                self._copies.follow_engine()
            self._worker.store(plan)

    @harmless(lambda: None)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        del forward_context, kwargs
        plan = _plan_of(self._connector_metadata)
        if self._worker is not None and self._config is not None and plan.loads:
            if isinstance(self._copies, Staged):
                self._copies.follow_engine()
            self._worker.load(plan, synchronous=self._config.load != "async")

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before the forward pass begins, or between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Whole chunks are stored a step later, when it is known that they count."""

    def wait_for_save(self) -> None:
        """Blocks are held until their stores have ended: there is nothing to wait for."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    @harmless(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        del finished_req_ids  # the plan says which of them the engine holds blocks for
        if self._worker is None:
            return KVConnectorTransferResults()
        stored, received = self._worker.ended()
        return KVConnectorTransferResults(finished_sending=stored, finished_recving=received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.invalid_blocks()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._config is not None:
            self._operations.close()

    # The scheduler's half.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if self._scheduler is not None:
            self._scheduler.identify([each.identity for each in metadata.values() if isinstance(each, Handshake)])

    @harmless(lambda: None)
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    @harmless(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is None or num_external_tokens <= 0:
            return
        ids = blocks.get_block_ids()[0]
        try:
            self._scheduler.allocated(request, ids, num_external_tokens)
        except Exception as error:  # not only harmless: the engine now waits for a load
            complaints.note("planning a load", error)
            self._scheduler.fail_load(request, ids, num_external_tokens)

    @harmless(dict)
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if self._scheduler is None or not num_external_tokens:
            return {}
        found = self._scheduler.hit_tiers(request, num_external_tokens)
        return {_SOURCES[tier]: tokens for tier, tokens in found.items()}

    @harmless(StepMetadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepMetadata()
        state = scheduler_output.kv_connector_block_state

        def blocks_of(name: str) -> list[int]:
            found = state.get_block_ids(name) if state is not None else None
            return list(found[0]) if found else []

        return StepMetadata(
            self._scheduler.plan(
                list(scheduler_output.num_scheduled_tokens), scheduler_output.preempted_req_ids or (), blocks_of
            )
        )

    @harmless(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            self._scheduler.arrived(connector_output.finished_recving or set(), connector_output.invalid_block_ids)
            if (stats := connector_output.kv_connector_stats) is not None:
                self._scheduler.measured(stats.data)

    @harmless(lambda: (False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler is not None and self._scheduler.finished(request, block_ids), None

    def reset_cache(self) -> bool | None:
        """The engine forgets all KV, as it does before its weights are replaced: share no more with what was."""
        if self._scheduler is None or self._config is None or not self._config.weights_may_change:
            return None
        return self._scheduler.renew()

    # Both.

    def get_kv_connector_stats(self) -> PolarKVStats | None:
        if complaints.count != self._defects:
            self._meter.note("defects", complaints.count - self._defects)
            self._defects = complaints.count
        data = self._meter.take()
        return PolarKVStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PolarKVStats:
        return PolarKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: dict[Any, Any], labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PolarKVPromMetrics:  # fmt: skip
        return PolarKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _register() -> None:
    """By its name alone, vLLM's MultiConnector asks for the class again, for metrics."""
    with contextlib.suppress(ValueError):  # known already
        KVConnectorFactory.register_connector("PolarKVConnector", __name__, "PolarKVConnector")


_register()


def _log_as_vllm() -> None:
    """What the client says appears in vLLM's log, in its form; unless logging is set up for the client already."""
    ours, theirs = logging.getLogger("polarkv_client"), logging.getLogger("vllm")
    if ours.handlers or logging.getLogger().handlers or not theirs.handlers:
        return
    ours.handlers[:] = theirs.handlers
    ours.setLevel(theirs.level)
    ours.propagate = False


def _plan_of(metadata: KVConnectorMetadata | None) -> StepPlan:
    return metadata.plan if isinstance(metadata, StepMetadata) else _NO_PLAN
