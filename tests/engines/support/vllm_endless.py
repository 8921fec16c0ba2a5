"""A connector for tests: it loads the prompts of some requests for as long as they live. ``MultiConnector`` has it."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tests.engines.support.vllm_nothing import Nothing

PREFIX = "endless"
waiting: set[str] = set()
_ended: set[str] = set()


class Endless(Nothing):
    """Both halves are in one process."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        mine = request.request_id.startswith(PREFIX)
        return (request.num_tokens // 128 * 128 - num_computed_tokens, True) if mine else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            waiting.add(request.request_id)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        if request.request_id in waiting:
            waiting.remove(request.request_id)
            _ended.add(request.request_id)
        return False, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        done = set(_ended)
        _ended.clear()
        return KVConnectorTransferResults(finished_recving=done)
