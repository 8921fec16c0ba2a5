"""The webhook over real sockets: TLS as the API server speaks it, bounds, and every way to let a pod through."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from polarkv_client.errors import ConfigurationError
from polarkv_operator.clients.kube import ApiError, Object, Unreachable
from polarkv_operator.webhooks import server
from polarkv_operator.webhooks.certificates import renew
from polarkv_operator.webhooks.keeper import SECRET
from tests.operator.support.inference_pods import container, pod
from tests.operator.support.webhooks import (
    CONFIGURATION,
    HeldApi,
    Running,
    cluster,
    patch_of,
    review,
    running,
    settings_for_tests,
)
from tests.support.waiting import wait_until

DAY = timedelta(days=1)


def bundle_of(api: HeldApi) -> bytes:
    """What the API server was told to trust; empty: nothing yet."""
    return base64.b64decode(
        api.of_kind("MutatingWebhookConfiguration")[0]["webhooks"][0]["clientConfig"].get("caBundle", "")
    )


@pytest.fixture
def api() -> HeldApi:
    return HeldApi(CONFIGURATION, cluster())


@pytest.fixture
def webhook(api: HeldApi) -> Iterator[Running]:
    with running(settings_for_tests(), api) as one:
        wait_until(lambda: one.health("/readyz").status_code == 200, "a certificate")
        yield one


@pytest.fixture
def http(api: HeldApi, webhook: Running) -> Iterator[httpx.Client]:
    with webhook.trusting(bundle_of(api)) as client:
        yield client


def ask(http: httpx.Client, document: Object, **request: Any) -> Object:
    answer = http.post("/mutate", json=review(document, **request))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["apiVersion"], body["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response: Object = body["response"]
    return response


def metric(webhook: Running, name: str) -> float:
    lines = webhook.health("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition(" ")[0] == name)


def test_a_pod_is_injected_over_tls(http: httpx.Client, webhook: Running) -> None:
    response = ask(http, pod())
    patch = patch_of(response)
    image = next(one["value"][0]["image"] for one in patch if one["path"] == "/spec/initContainers")
    endpoint = next(one["value"] for one in patch if one["value"] and "POLARKV_ENDPOINT" in str(one["value"]))
    assert image == "polarkv:1"
    assert endpoint == {"name": "POLARKV_ENDPOINT", "value": "tcp://kv-manager.models.svc:7700"}
    assert response["auditAnnotations"]["injection"].startswith("injected: ")
    assert metric(webhook, 'polarkv_webhook_pods_total{outcome="injected",reason=""}') == 1
    assert metric(webhook, "polarkv_webhook_decision_seconds_count") == 1


def test_the_clusters_spec_says_what_is_injected(api: HeldApi, http: httpx.Client) -> None:
    api.create(
        cluster(
            "other",
            imagePullPolicy="Always",
            imagePullSecrets=[{"name": "registry"}],
            injection={"image": "client:2", "tenant": "b"},
            security={"tenants": [{"name": "a"}, {"name": "b"}]},
            cache={"chunkTokens": 512},
        )
    )
    asking = pod()
    asking["metadata"]["labels"]["polarkv.io/inject"] = "other"
    text = json.dumps(patch_of(ask(http, asking)))
    for part in ("client:2", '"Always"', '"registry"', "other-client", '"key": "b"', "tcp://other-manager", "512"):
        assert part in text, part


@pytest.mark.parametrize(
    ("request_", "document"),
    [
        ({"operation": "UPDATE"}, pod()),
        ({"operation": "CREATE", "subResource": "binding"}, pod()),
        ({"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}}, pod()),
        ({}, {"metadata": {"name": "a"}, "spec": {"containers": []}}),
        ({}, {"metadata": {"labels": {"polarkv.io/inject": ""}}}),
        ({}, {"metadata": 7}),
        ({"object": None}, {}),
    ],
)
def test_what_does_not_ask_is_let_through(http: httpx.Client, webhook: Running, request_: Any, document: Any) -> None:
    response = ask(http, document, **request_)
    assert response == {"uid": "705ab4f5", "allowed": True}


def test_why_a_pod_is_skipped_is_told_three_times(api: HeldApi, http: httpx.Client, webhook: Running) -> None:
    asking = pod(container("sleep", "infinity"))
    api.create({"apiVersion": "v1", "kind": "Pod", **asking})
    response = ask(http, asking)
    text = patch_of(response)[-1]["value"]
    assert text.startswith("skipped: EngineNotFound: container server: no engine is seen in its command")
    assert response["warnings"][0].startswith("polarkv: not injected: EngineNotFound: ")
    (event,) = wait_until(lambda: api.of_kind("Event"), "the Event")
    assert (event["reason"], event["type"], event["message"]) == ("InjectionSkipped", "Warning", text)
    assert event["involvedObject"]["uid"] == api.of_kind("Pod")[0]["metadata"]["uid"]
    assert metric(webhook, 'polarkv_webhook_pods_total{outcome="skipped",reason="EngineNotFound"}') == 1


def test_of_a_replica_sets_pods_one_event_is_written_about_the_set(api: HeldApi, http: httpx.Client) -> None:
    asking = pod(container("sleep", "infinity"))
    del asking["metadata"]["name"]
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-1", "uid": "u-1", "controller": True}
    asking["metadata"] |= {"generateName": "web-1-", "ownerReferences": [owner]}
    for _ in range(3):
        ask(http, asking)
    ask(http, pod(container("sleep", "infinity")), dryRun=True)
    (event,) = wait_until(lambda: api.of_kind("Event"), "the Event")
    assert event["involvedObject"] == {
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-1", "namespace": "models", "uid": "u-1"
    }  # fmt: skip


def test_a_cluster_that_is_not_there(http: httpx.Client) -> None:
    text = patch_of(ask(http, pod(), namespace="elsewhere"))[-1]["value"]
    assert text == (
        "skipped: ClusterNotFound: there is no PolarKVCluster 'kv' in namespace 'elsewhere'; a pod uses a cluster of "
        "its own namespace"
    )


def test_a_cluster_that_wants_none_or_is_not_valid(api: HeldApi, http: httpx.Client) -> None:
    api.create(cluster("off", injection={"enabled": False}))
    api.create(cluster("bad", cacheNodes={"replicas": -1}))
    for name, reason in (("off", "Disabled"), ("bad", "ClusterNotRead")):
        asking = pod()
        asking["metadata"]["labels"]["polarkv.io/inject"] = name
        assert f"skipped: {reason}: " in patch_of(ask(http, asking))[-1]["value"]


def test_a_burst_reads_its_cluster_once(api: HeldApi, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polarkv_operator.webhooks.clusters.FRESH_S", 60.0)  # longer than a burst takes anywhere
    before = len(api.calls)
    for _ in range(20):
        assert patch_of(ask(http, pod()))
    assert sum("polarkvclusters" in call for call in api.calls[before:]) <= 2


def test_an_api_server_that_does_not_answer_delays_no_pod(api: HeldApi) -> None:
    hanging, release = threading.Event(), threading.Event()

    def hang(call: str) -> None:
        if "polarkvclusters" in call:
            hanging.set()
            release.wait(30)

    with running(settings_for_tests(lookup_ms=50), api) as webhook:
        wait_until(lambda: webhook.health("/readyz").status_code == 200, "a certificate")
        api.before = hang
        try:
            with webhook.trusting(bundle_of(api)) as http:
                text = patch_of(ask(http, pod()))[-1]["value"]
        finally:
            release.set()
    assert hanging.is_set()
    assert text == "skipped: ClusterNotRead: PolarKVCluster 'kv' cannot be read: no answer in time"


def test_while_the_api_server_is_away_what_is_known_is_used(
    api: HeldApi, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert patch_of(ask(http, pod()))
    monkeypatch.setattr("polarkv_operator.webhooks.clusters.FRESH_S", 0.0)
    api.failure = Unreachable(0, "gone")
    assert "injected: " in json.dumps(patch_of(ask(http, pod())))
    asking = pod()
    asking["metadata"]["labels"]["polarkv.io/inject"] = "unknown"
    assert "cannot be read" in patch_of(ask(http, asking))[-1]["value"]


def test_a_defect_lets_the_pod_through(
    http: httpx.Client, webhook: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def defect(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("polarkv_operator.webhooks.review.inject", defect)
    assert ask(http, pod()) == {"uid": "705ab4f5", "allowed": True}
    assert metric(webhook, 'polarkv_webhook_pods_total{outcome="error",reason="RuntimeError"}') == 1
    assert "let through without a decision" in caplog.text


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"[" * 100_000, b'{"apiVersion": "admission.k8s.io/v1beta1", "request": {}}',
     b'{"apiVersion": "admission.k8s.io/v1", "request": {"uid": 7}}', b"\xff\xfe"],
)  # fmt: skip
def test_what_is_no_review_is_refused(http: httpx.Client, webhook: Running, body: bytes) -> None:
    answer = http.post("/mutate", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]
    assert metric(webhook, "polarkv_webhook_refused_requests_total") == 1
    assert patch_of(ask(http, pod()))


def test_a_body_beyond_the_limit_is_refused(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_BODY_BYTES", 100_000)
    assert http.post("/mutate", content=b" " * 100_001).status_code == 413
    big = pod(container("vllm", "serve", "m", env=[{"name": "A", "value": "x" * 90_000}]))
    assert patch_of(ask(http, big))


def test_a_body_that_does_not_come_is_given_up(api: HeldApi, webhook: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_S", 0.1)
    context = ssl.create_default_context(cadata=bundle_of(api).decode())
    with (
        socket.create_connection(("127.0.0.1", webhook.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        secure.sendall(b"POST /mutate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert secure.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_there_is_no_plain_http_and_nothing_else(webhook: Running, http: httpx.Client) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"http://localhost:{webhook.port}/mutate", json=review(pod()), trust_env=False)
    assert http.get("/").status_code == http.get("/metrics").status_code == 404
    assert http.get("/mutate").status_code == 405


def test_who_trusts_another_authority_is_not_talked_to(webhook: Running) -> None:
    other = renew(None, ["localhost"], datetime.now(UTC)).bundle
    with webhook.trusting(other) as http, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        http.post("/mutate", json=review(pod()))


def serial(webhook: Running) -> int:
    """Of the certificate that a new connection is shown."""
    from cryptography import x509

    pem = ssl.get_server_certificate(("127.0.0.1", webhook.port), timeout=10)
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def test_a_certificate_is_renewed_without_a_restart(api: HeldApi) -> None:
    # From the past to the present: what it makes in the end is valid by the clients' own clock.
    clock = [datetime.now(UTC) - 61 * DAY]
    with running(settings_for_tests(), api, lambda: clock[0]) as webhook:
        wait_until(lambda: webhook.health("/readyz").status_code == 200, "a certificate")
        trusted, first = bundle_of(api), serial(webhook)
        with webhook.trusting(trusted) as kept:
            assert patch_of(ask(kept, pod()))
            clock[0] += 61 * DAY
            wait_until(lambda: serial(webhook) != first, "the renewed certificate")
            # The connection that is there goes on; a new one is trusted by who has not looked since.
            assert patch_of(ask(kept, pod()))
            with webhook.trusting(trusted) as fresh:
                assert patch_of(ask(fresh, pod()))
        assert (
            metric(webhook, "polarkv_webhook_certificate_expiry_timestamp_seconds") > (clock[0] + 80 * DAY).timestamp()
        )


def test_without_a_certificate_it_is_alive_and_not_ready(api: HeldApi) -> None:
    api.failure = ApiError(403, "secrets is forbidden")
    with running(settings_for_tests(), api) as webhook:
        assert webhook.health("/healthz").status_code == 200
        answer = webhook.health("/readyz")
        assert (answer.status_code, answer.text) == (503, "no certificate to show: there is none yet; see the log\n")
        wait_until(lambda: metric(webhook, "polarkv_webhook_certificate_check_failures") >= 1, "the failure counted")
        api.failure = None
        wait_until(lambda: webhook.health("/readyz").status_code == 200, "a certificate")
        assert metric(webhook, "polarkv_webhook_certificate_check_failures") == 0


def test_a_certificate_that_ended_is_not_ready(api: HeldApi) -> None:
    clock = [datetime.now(UTC)]
    with running(settings_for_tests(), api, lambda: clock[0]) as webhook:
        wait_until(lambda: webhook.health("/readyz").status_code == 200, "a certificate")
        api.failure = Unreachable(0, "gone")
        clock[0] += 91 * DAY
        assert "it has ended" in webhook.health("/readyz").text


def test_a_folders_certificate_is_shown_and_renewed(api: HeldApi, tmp_path: Path) -> None:
    def put(now: datetime) -> bytes:
        made = renew(None, ["localhost"], now)
        (tmp_path / "tls.crt").write_bytes(made.serving.certificate)
        (tmp_path / "tls.key").write_bytes(made.serving.key)
        return made.bundle

    bundle = put(datetime.now(UTC))
    with running(settings_for_tests(certificate_directory=tmp_path), api) as webhook:
        wait_until(lambda: webhook.health("/readyz").status_code == 200, "a certificate")
        with webhook.trusting(bundle) as http:
            assert patch_of(ask(http, pod()))
        first = serial(webhook)
        put(datetime.now(UTC))
        wait_until(lambda: serial(webhook) != first, "the renewed certificate")
    assert not api.of_kind("Secret")


def test_two_replicas_show_one_certificate(api: HeldApi) -> None:
    with running(settings_for_tests(), api) as one, running(settings_for_tests(), api) as two:
        for each in (one, two):
            wait_until(lambda each=each: each.health("/readyz").status_code == 200, "a certificate")  # type: ignore[misc]
        assert serial(one) == serial(two)
    assert len(api.of_kind("Secret")) == 1
    assert SECRET.path("polarkv-system", "polarkv-webhook-tls") in api.objects


def test_an_address_that_is_taken_is_named(api: HeldApi) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigurationError, match=f"port='127.0.0.1:{port}': Address already in use"),
            running(settings_for_tests(port=port), api),
        ):
            pass
