"""`polarkv --cluster`: the way to a cluster in Kubernetes, with a kubectl that is a script of the test's."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from polarkv_client.cli import kubernetes
from polarkv_client.cli.main import ExitCode, run
from polarkv_client.errors import ConfigurationError, Unavailable
from polarkv_operator.api import parse
from polarkv_operator.resources import names
from tests.support.waiting import wait_until

KUBECTL = """#!{python}
import json, sys, time
arguments = sys.argv[1:]
if "polarkvcluster" in arguments and "gone" in arguments:
    sys.exit('Error from server (NotFound): polarkvclusters.polarkv.io "gone" not found')
if "secret" in arguments:
    name = arguments[arguments.index("secret") + 1]
    if name.startswith("closed"):
        sys.exit('Error from server (Forbidden): secrets is forbidden')
    key = "default" if name.endswith("-client") else "token"
    print(json.dumps({{"data": {{key: "{token}"}}}}))
if "port-forward" in arguments:
    if "service/broken-manager" in arguments:
        sys.exit("error: unable to forward port because pod is not running")
    print("Forwarding from 127.0.0.1:{rpc} -> 7700", flush=True)
    print("Forwarding from [::1]:{rpc} -> 7700", flush=True)
    print("Forwarding from 127.0.0.1:{http} -> 7701", flush=True)
    time.sleep(300)
"""


@pytest.fixture(autouse=True)
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a kubectl into PATH; the test may say which ports it forwards."""
    for name in ("KUBERNETES_SERVICE_HOST", "POLARKV_CLUSTER", "POLARKV_ENDPOINT", "POLARKV_TOKEN", "POLARKV_ADMIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    kubernetes.locate.cache_clear()

    def write(rpc: int = 1111, http: int = 2222) -> None:
        token = base64.b64encode(b"the token of a test").decode()
        path = tmp_path / "kubectl"
        path.write_text(KUBECTL.format(python=sys.executable, token=token, rpc=rpc, http=http))
        path.chmod(0o755)

    write()
    return write


def test_from_outside_by_port_forward_with_the_tokens_that_may_be_read() -> None:
    found = kubernetes.locate("inference/demo")
    assert found == {
        "endpoint": "tcp://127.0.0.1:1111", "admin": "http://127.0.0.1:2222",
        "token": "the token of a test", "admin_token": "the token of a test",
    }  # fmt: skip
    assert kubernetes.locate("inference/demo") is found
    assert set(kubernetes.locate("inference/closed")) == {"endpoint", "admin"}
    kubernetes.end_forwards()


def test_the_forward_ends_with_the_command_however_it_ends(tmp_path: Path) -> None:
    code = "from polarkv_client.cli.kubernetes import locate; print(locate('a/b'), flush=True); input()"
    command = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None and "1111" in command.stdout.readline()
    children = psutil.Process(command.pid).children(recursive=True)
    assert children
    command.kill()
    command.wait(30)
    command.stdout.close()
    assert command.stdin is not None
    command.stdin.close()
    wait_until(lambda: not any(child.is_running() for child in children), "kubectl to end")


def test_from_inside_by_the_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert kubernetes.locate("inference/demo")["endpoint"] == "tcp://demo-manager.inference.svc:7700"
    assert kubernetes.locate("inference/demo")["token"]
    kubernetes.locate.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert set(kubernetes.locate("inference/demo")) == {"endpoint", "admin"}


def test_it_agrees_with_the_operator_on_the_addresses() -> None:
    spec = {"cacheNodes": {"memory": {"size": "1Gi"}, "storage": {"volumeSize": "10Gi"}}}
    cluster = parse({"apiVersion": "polarkv.io/v1alpha1", "kind": "PolarKVCluster", "spec": spec,
                     "metadata": {"name": "demo", "namespace": "inference"}})  # fmt: skip
    assert kubernetes.addresses("inference", "demo") == {
        "endpoint": names.endpoint(cluster),
        "admin": names.admin_endpoint(cluster),
    }


@pytest.mark.parametrize("name", ["demo", "a/", "/b", "a/b/c", "A/b", "a/-b"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(ConfigurationError, match="NAMESPACE/NAME"):
        kubernetes.locate(name)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such cluster"):
        kubernetes.locate("inference/gone")
    with pytest.raises(Unavailable, match="pod is not running"):
        kubernetes.locate("inference/broken")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(ConfigurationError, match="kubectl"):
        kubernetes.locate("inference/demo")


def test_the_command_uses_it_and_the_environment_goes_before_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POLARKV_ADMIN", "http://127.0.0.1:9")
    assert run(["--cluster", "inference/demo", "ls", "--json"]) == ExitCode.UNREACHABLE
    kubernetes.end_forwards()
    assert "127.0.0.1:9" in json.loads(capsys.readouterr().out)["error"]["text"]
