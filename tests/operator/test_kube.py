"""The Kubernetes client against a scripted server: what is tried again, how often, and that nothing hangs."""

from __future__ import annotations

import gc
import json
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import urllib3
from kubernetes import client as official

from polarkv_operator.clients import kube
from polarkv_operator.clients.kube import ApiError, Conflict, Kind, Unreachable, Writer, taken_over

POD = Kind("v1", "Pod")


class Script:
    """Answers in order; the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], Any]] = []
        self.asked: list[tuple[str, str]] = []
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                script.asked.append((self.command, self.path))
                status, headers, body = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
                if status == 0:
                    self.close_connection = True
                    return
                data = json.dumps(body).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()


def writer(script: Script, pauses: list[float]) -> Writer:
    settings = official.Configuration()
    settings.host = f"http://127.0.0.1:{script.server.server_port}"
    settings.retries = False
    return Writer(official.ApiClient(settings), pauses.append)


FINE: tuple[int, dict[str, str], Any] = (200, {}, {"metadata": {"name": "a"}})


@pytest.mark.parametrize("bad", [(429, {"Retry-After": "2"}, {}), (503, {}, {}), (500, {}, {}), (0, {}, {})])
def test_what_may_pass_is_tried_again(script: Script, bad: tuple[int, dict[str, str], Any]) -> None:
    pauses: list[float] = []
    script.answers = [bad, bad, FINE]
    assert writer(script, pauses).get(POD, "ns", "a") == FINE[2]
    assert len(script.asked) == 3
    assert pauses == [2, 2] if bad[0] == 429 else all(0 < pause < 1 for pause in pauses)


def test_it_gives_up_after_three_attempts_and_says_what_it_heard(script: Script) -> None:
    script.answers = [(503, {"Retry-After": "3600"}, {"message": "etcd is away"})]
    pauses: list[float] = []
    with pytest.raises(Unreachable, match="503: etcd is away"):
        writer(script, pauses).get(POD, "ns", "a")
    assert len(script.asked) == 3 and pauses == [kube.LONGEST_PAUSE_S] * 2


def test_what_is_refused_is_not_tried_again(script: Script) -> None:
    script.answers = [(409, {}, {"message": "changed"}), (403, {}, {"message": "forbidden"}), (404, {}, {})]
    api = writer(script, [])
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "ns"}}
    with pytest.raises(Conflict):
        api.replace(manifest)
    with pytest.raises(ApiError, match="forbidden"):
        api.apply(manifest)
    assert api.get(POD, "ns", "a") is None
    api.delete(POD, "ns", "a", "uid")
    assert len(script.asked) == 4


def test_a_field_that_does_not_exist_is_a_refusal_and_not_a_fault(script: Script) -> None:
    message = "failed to create typed patch object (ns/a; v1, Kind=Pod): .spec.size: field not declared in schema"
    script.answers = [(500, {}, {"message": message})]
    with pytest.raises(ApiError, match=r"422.*spec\.size") as caught:
        writer(script, []).apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "ns"}})
    assert caught.value.status == 422 and len(script.asked) == 1


def test_what_would_be_done_twice_is_not_tried_again(script: Script) -> None:
    script.answers = [(0, {}, {})]
    with pytest.raises(Unreachable):
        writer(script, []).create({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "a", "namespace": "ns"}})
    assert len(script.asked) == 1


def test_a_server_that_is_not_there_is_an_error_of_ours(script: Script) -> None:
    script.answers = [FINE]
    api = writer(script, [])
    api._client.configuration.host = "http://127.0.0.1:9"
    with pytest.raises(Unreachable):
        api.get(POD, "ns", "a")


def test_paths_and_lists(script: Script) -> None:
    script.answers = [
        (200, {}, {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "more"}}),
        (200, {}, {"items": None, "metadata": {}}),
    ]
    kind = Kind("networking.k8s.io/v1", "NetworkPolicy")
    found = writer(script, []).find(kind, "ns", "x=y")
    assert found == [{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "a"}}]
    assert script.asked[0][1].startswith("/apis/networking.k8s.io/v1/namespaces/ns/networkpolicies?labelSelector=x%3Dy")
    assert "continue=more" in script.asked[1][1]


def test_what_people_wrote_over_ours_becomes_ours_and_labels_stay_theirs() -> None:
    mine = {"manager": "polarkv-operator", "operation": "Apply", "fieldsV1": {"f:spec": {"f:a": {}}}}
    theirs = {
        "manager": "kubectl-edit", "operation": "Update",
        "fieldsV1": {"f:spec": {"f:b": {}}, "f:metadata": {"f:labels": {}}},
    }  # fmt: skip
    controller = {"manager": "kube-controller-manager", "operation": "Update", "fieldsV1": {"f:spec": {"f:c": {}}}}
    status = {"manager": "x", "operation": "Update", "subresource": "status", "fieldsV1": {"f:status": {}}}
    assert taken_over([mine, theirs, controller, status]) == [
        {**mine, "fieldsV1": {"f:spec": {"f:a": {}, "f:b": {}}}},
        {**theirs, "fieldsV1": {"f:metadata": {"f:labels": {}}}},
        controller,
        status,
    ]
    assert taken_over([mine, controller, status]) is None
    assert taken_over([theirs]) is None


def test_a_connection_that_is_reset_before_its_handshake_is_no_answer_and_no_failure_of_the_test_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def connect_and_be_reset(self: urllib3.connection.HTTPConnection) -> socket.socket:
            made = socket.create_connection(server.getsockname())
            peer, _ = server.accept()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
            return made

        monkeypatch.setattr(urllib3.connection.HTTPConnection, "_new_conn", connect_and_be_reset)
        settings = official.Configuration()
        settings.host, settings.retries = f"https://127.0.0.1:{server.getsockname()[1]}", False
        with pytest.raises(Unreachable, match="reset by peer"):
            Writer(official.ApiClient(settings), lambda _: None).get(POD, "ns", "one")
        # Now, not in a test that comes later: the socket that Python left behind warns when it is collected.
        gc.collect()
