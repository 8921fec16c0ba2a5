"""Inference pods as people write them, and a JSON patch applied as the API server would."""

from __future__ import annotations

import copy
from typing import Any

import jsonpatch

from polarkv_operator.webhooks.injection import Connection, Decision, InjectionSettings, inject

Object = dict[str, Any]

CONNECTION = Connection("kv", "tcp://kv-manager.models.svc:7000", "kv-client", "default", 256)
SETTINGS = InjectionSettings(image="registry.example/polarkv:1")
VLLM_JSON = (
    '{"kv_connector": "PolarKVConnector", "kv_connector_module_path": "polarkv_client.connectors.vllm", '
    '"kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"chunk_tokens": 256}}'
)
SGLANG_JSON = (
    '{"backend_name": "polarkv", "module_path": "polarkv_client.connectors.sglang", '
    '"class_name": "PolarKVStorage", "interface_v1": 1}'
)


def container(*command: str, name: str = "server", **more: Any) -> Object:
    """A container with a command; pass ``args=`` or ``image=`` for what an image's entry point runs."""
    made: Object = {"name": name, "image": "engine:1", **more}
    if command:
        made["command"] = list(command)
    return made


def pod(*containers: Object, annotations: dict[str, str] | None = None, **spec: Any) -> Object:
    """A pod that asks for injection."""
    metadata: Object = {"name": "inference", "namespace": "models", "labels": {"polarkv.io/inject": "kv"}}
    if annotations is not None:
        metadata["annotations"] = annotations
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": list(containers) or [container("vllm", "serve", "m")], **spec},
    }


def patched(document: Object, decision: Decision) -> Object:
    """The pod with a decision's patch, applied by another library than made it; the pod given stays as it was."""
    before = copy.deepcopy(document)
    after: Object = jsonpatch.apply_patch(document, [dict(operation) for operation in decision.patch])
    assert document == before
    return after


def injected(document: Object) -> Object:
    """The pod after injection, which must not have skipped it."""
    decision = inject(document, CONNECTION, SETTINGS)
    assert decision.reason is None, decision.status
    return patched(document, decision)


def command_line(document: Object, index: int = 0) -> list[str]:
    """A container's command and args in one."""
    one = document["spec"]["containers"][index]
    return [*(one.get("command") or ()), *(one.get("args") or ())]


def environment(document: Object, index: int = 0) -> Object:
    """A container's variables: value, or where it comes from."""
    listed = document["spec"]["containers"][index].get("env") or []
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in listed}


def status(document: Object) -> str:
    """What injection wrote about itself."""
    text: str = document["metadata"]["annotations"]["polarkv.io/injection"]
    return text
