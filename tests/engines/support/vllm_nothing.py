"""A connector for vLLM that does nothing: what the calls of any connector cost. Runs in the engine's environment."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class Nothing(KVConnectorBase_V1):  # type: ignore[misc]
    """Has the methods that it must have; all others are the interface's own."""

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...

    def wait_for_layer_load(self, *_: Any) -> None: ...

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, *_: Any) -> None: ...

    def build_connector_meta(self, _: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()
