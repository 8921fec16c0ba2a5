"""The connection ConfigMap: what a client, a person or an engine's flags need, apart from the token.

Its names are those of the connectors' settings (``polarkv_client.connectors.settings``), whichever way they are used.
"""

from __future__ import annotations

import json

from polarkv_operator.api.cluster import PolarKVCluster
from polarkv_operator.resources import names
from polarkv_operator.resources.common import Object, build
from polarkv_operator.resources.engine_arguments import SGLANG_EXTRA_CONFIG, VLLM_TRANSFER_CONFIG

ENDPOINT_KEY = "endpoint"
ADMIN_KEY = "admin"
CONNECTION_KEY = "connection.json"
VLLM_KEY = "vllm-kv-transfer-config.json"
SGLANG_KEY = "sglang-hicache-storage-backend-extra-config.json"
# The names of the client's own variables, for `envFrom`.
ENDPOINT_VARIABLE = "POLARKV_ENDPOINT"
CHUNK_TOKENS_VARIABLE = "POLARKV_CHUNK_TOKENS"


def config_map(cluster: PolarKVCluster) -> Object:
    """The ConfigMap. The token is in the Secret <cluster>-client, under the tenant's name."""
    endpoint = names.endpoint(cluster)
    chunk_tokens = cluster.spec.cache.chunk_tokens
    vllm = {**VLLM_TRANSFER_CONFIG, "kv_connector_extra_config": {"endpoint": endpoint, "chunk_tokens": chunk_tokens}}
    connection = {"endpoint": endpoint, "admin": names.admin_endpoint(cluster), "chunk_tokens": chunk_tokens}
    data = {
        ENDPOINT_KEY: endpoint,
        ADMIN_KEY: names.admin_endpoint(cluster),
        ENDPOINT_VARIABLE: endpoint,
        CHUNK_TOKENS_VARIABLE: str(chunk_tokens),
        # As `polarkv up` writes it, for POLARKV_CONNECTION.
        CONNECTION_KEY: json.dumps(connection),
        VLLM_KEY: json.dumps(vllm),
        # SGLang's chunk is its page: its size is the engine's to choose.
        SGLANG_KEY: json.dumps({**SGLANG_EXTRA_CONFIG, "endpoint": endpoint}),
    }
    return build(cluster, "v1", "ConfigMap", names.connection(cluster), data=data)
