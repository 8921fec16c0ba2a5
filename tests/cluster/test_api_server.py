"""The API server alone: what tests of the operator's loop stand on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.support import programs
from tests.cluster.support.api_server import ApiServer
from tests.cluster.support.kubectl import Kubectl, KubectlError
from tests.support.waiting import wait_until


def config_map(name: str, **data: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def test_it_is_the_version_that_the_module_names(api_server: Path) -> None:
    shown = json.loads(Kubectl(api_server).run("version", "-o", "json"))
    assert shown["serverVersion"]["gitVersion"] == shown["clientVersion"]["gitVersion"] == programs.kubernetes_version()


def test_it_keeps_objects_across_its_restart(api_server_process: ApiServer) -> None:
    kubectl = Kubectl(api_server_process.kubeconfig)
    kubectl.apply(config_map("kept", color="blue"))
    api_server_process.stop()
    with pytest.raises(KubectlError, match="refused"):
        kubectl.get("configmap", "kept")
    api_server_process.start()
    assert kubectl.get("configmap", "kept")["data"] == {"color": "blue"}


def test_it_validates_what_it_is_given(api_server: Path) -> None:
    with pytest.raises(KubectlError, match="Invalid value"):
        Kubectl(api_server).apply(config_map("Not_A_Name"))


def test_rights_are_the_users_own(api_server_process: ApiServer) -> None:
    with pytest.raises(KubectlError, match='User "nobody" cannot get resource'):
        Kubectl(api_server_process.kubeconfig_of("nobody", "nothing")).get("configmap", "kept")


def test_every_write_is_in_the_audit_log_and_no_read(api_server_process: ApiServer) -> None:
    kubectl = Kubectl(api_server_process.kubeconfig)
    kubectl.apply(config_map("audited"))
    kubectl.get("configmap", "audited")

    def verbs() -> list[str]:
        lines = map(json.loads, api_server_process.audit_log.read_text(encoding="utf-8").splitlines())
        return [line["verb"] for line in lines if line.get("objectRef", {}).get("name") == "audited"]

    assert wait_until(verbs, "the write in the audit log") == ["patch"]
