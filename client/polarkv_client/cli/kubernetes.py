"""Where a cluster in Kubernetes is: its Service from inside, `kubectl port-forward` from outside.

kubectl brings the user's own way to the API server and their rights; no Kubernetes library is needed.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from polarkv_client.errors import ConfigurationError, Unavailable

RPC_PORT, HTTP_PORT = 7700, 7701
CALL_S, FORWARD_S = 20.0, 20.0
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_FORWARDING = re.compile(r"^Forwarding from 127\.0\.0\.1:(\d+) -> (\d+)$")
_forwards: list[subprocess.Popen[str]] = []
# The pipe to its standard input ends with us, however we end; then kubectl does, too.
_HELD = '"$@" & child=$!; trap "kill $child" TERM; cat >/dev/null; kill $child'


@cache
def locate(cluster: str) -> dict[str, str]:
    """Settings of a client for a cluster named ``NAMESPACE/NAME``: endpoint, admin, and the tokens that may be read.

    Raises:
        ConfigurationError: the name is none, there is no such cluster, or kubectl is not there.
        Unavailable: kubectl gives no connection.
    """
    namespace, _, name = cluster.partition("/")
    if not _NAME.fullmatch(namespace) or not _NAME.fullmatch(name):
        raise ConfigurationError("--cluster", cluster, "use NAMESPACE/NAME, as in kubectl get pkv --all-namespaces")
    inside = "KUBERNETES_SERVICE_HOST" in os.environ
    if inside and not shutil.which("kubectl"):
        return addresses(namespace, name)  # tokens then come from the environment
    if not shutil.which("kubectl"):
        raise ConfigurationError("--cluster", cluster, "needs kubectl in PATH: it brings the way to your cluster")
    tokens = _tokens(namespace, name)
    if inside:
        return {**addresses(namespace, name), **tokens}
    rpc, http = _forward(namespace, f"service/{name}-manager")
    return {"endpoint": f"tcp://127.0.0.1:{rpc}", "admin": f"http://127.0.0.1:{http}", **tokens}


def addresses(namespace: str, name: str) -> dict[str, str]:
    """Where a cluster's manager is, for pods."""
    host = f"{name}-manager.{namespace}.svc"
    return {"endpoint": f"tcp://{host}:{RPC_PORT}", "admin": f"http://{host}:{HTTP_PORT}"}


def _tokens(namespace: str, name: str) -> dict[str, str]:
    """The tokens that the user may read. Those of the environment go before them."""
    found = {}
    _kubectl(namespace, "get", "polarkvcluster", name, "-o", "name")  # a name that is none says so itself
    for secret, setting in ((f"{name}-client", "token"), (f"{name}-admin", "admin_token")):
        try:
            text = _kubectl(namespace, "get", "secret", secret, "-o", "json")
        except Unavailable:
            continue  # not everybody may read secrets; what needs the token will say so
        data: dict[str, Any] = json.loads(text).get("data", {})
        encoded = data.get("default") or data.get("token") or next(iter(data.values()), "")
        found[setting] = base64.b64decode(encoded).decode()
    return found


def _kubectl(namespace: str, *arguments: str) -> str:
    command = ["kubectl", f"--namespace={namespace}", f"--request-timeout={int(CALL_S)}s", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_S + 5, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"kubectl did not answer in {CALL_S:g} s") from error
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
    if "NotFound" in said[0] and "polarkvcluster" in arguments:
        fix = "there is no such cluster: see kubectl get pkv --all-namespaces"
        raise ConfigurationError("--cluster", f"{namespace}/{arguments[2]}", fix)
    raise Unavailable(f"kubectl {arguments[0]} {arguments[1]}: {said[0]}")


def _forward(namespace: str, target: str) -> tuple[int, int]:
    """Local ports of the manager's two, for as long as this process lives."""
    command = ["kubectl", f"--namespace={namespace}", "port-forward", target, f":{RPC_PORT}", f":{HTTP_PORT}"]
    process = subprocess.Popen(
        ["sh", "-c", _HELD, "sh", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    _forwards.append(process)
    ports: dict[int, int] = {}
    said: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in iter(process.stdout.readline, ""):
            if match := _FORWARDING.match(line.strip()):
                ports[int(match[2])] = int(match[1])
            else:
                said.append(line.strip())
                del said[:-5]

    threading.Thread(target=_until_closed, args=(read,), name="port-forward", daemon=True).start()
    deadline = time.monotonic() + FORWARD_S
    while len(ports) < 2:
        if process.poll() is not None or time.monotonic() >= deadline or any("error" in line for line in said):
            _end(process)
            raise Unavailable(f"kubectl port-forward {target}: {'; '.join(said) or 'it gave no port in time'}")
        time.sleep(0.02)
    return ports[RPC_PORT], ports[HTTP_PORT]


def _until_closed(read: Callable[[], None]) -> None:
    with contextlib.suppress(ValueError):  # the pipe was closed at our end
        read()


@atexit.register
def end_forwards() -> None:
    """End every forward of this process, and forget what was found by them."""
    locate.cache_clear()
    while _forwards:
        _end(_forwards.pop())


def _end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
