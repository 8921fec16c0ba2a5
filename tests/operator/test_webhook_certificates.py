"""Certificates over years of virtual time, and replicas that agree on them."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509 import verification

from polarkv_client.errors import PolarKVError
from polarkv_operator.clients.kube import ApiError
from polarkv_operator.webhooks import certificates
from polarkv_operator.webhooks.certificates import Credentials, from_secret_data, renew, to_secret_data
from polarkv_operator.webhooks.keeper import SECRET, Folder, Keeper, SharedSecret
from tests.operator.support.webhooks import CONFIGURATION, HeldApi, settings_for_tests

NAMES = ["polarkv-webhook.polarkv-system.svc", "polarkv-webhook.polarkv-system.svc.cluster.local"]
BEGIN = datetime(2027, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def trusts(bundle: bytes, shown: bytes, now: datetime, name: str = NAMES[0]) -> bool:
    """Whether a client with these authorities accepts a server's certificate at a time, by a verifier not our own."""
    store = verification.Store(x509.load_pem_x509_certificates(bundle))
    verifier = verification.PolicyBuilder().store(store).time(now).build_server_verifier(x509.DNSName(name))
    try:
        verifier.verify(x509.load_pem_x509_certificate(shown), [])
    except verification.VerificationError:
        return False
    return True


def test_a_new_certificate_is_good_for_its_names_alone() -> None:
    made = renew(None, NAMES, BEGIN)
    assert all(trusts(made.bundle, made.serving.certificate, BEGIN, name) for name in NAMES)
    assert not trusts(made.bundle, made.serving.certificate, BEGIN, "kubernetes.default.svc")
    # A clock that is half an hour behind sees no certificate from the future.
    assert trusts(made.bundle, made.serving.certificate, BEGIN - HOUR / 2)
    assert not trusts(renew(None, NAMES, BEGIN).bundle, made.serving.certificate, BEGIN)


def test_nothing_is_made_anew_without_need() -> None:
    made = renew(None, NAMES, BEGIN)
    assert renew(made, NAMES, BEGIN) is made
    assert renew(made, NAMES, BEGIN + timedelta(days=59)) is made
    assert renew(made, NAMES, BEGIN - timedelta(days=2)) is made
    after = renew(made, NAMES, BEGIN + timedelta(days=61))
    assert after.authorities == made.authorities
    assert after.serving != made.serving


def test_other_names_are_certified_at_once() -> None:
    made = renew(None, NAMES, BEGIN)
    after = renew(made, ["moved.elsewhere.svc"], BEGIN)
    assert trusts(made.bundle, after.serving.certificate, BEGIN, "moved.elsewhere.svc")


def test_over_years_what_is_shown_is_trusted_by_who_looked_an_hour_ago() -> None:
    now, held = BEGIN, renew(None, NAMES, BEGIN)
    seen: set[bytes] = set()
    while now < BEGIN + timedelta(days=3 * 365):
        before = held.bundle
        # Around every change by hours, in between by days.
        changed = renew(held, NAMES, now)
        step = HOUR if changed is not held else timedelta(hours=17)
        held = changed
        assert trusts(before, held.serving.certificate, now)
        assert trusts(held.bundle, held.serving.certificate, now + timedelta(days=20))
        assert len(held.authorities) <= 3
        seen.add(held.serving.certificate)
        now += step
    assert len(seen) >= 3 * 365 // 62
    first = renew(None, NAMES, BEGIN)
    assert len(held.authorities) >= 2 and held.authorities[0] != first.authorities[0]


def test_a_new_authority_signs_nothing_until_it_has_been_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = renew(None, NAMES, BEGIN)
    late = BEGIN + timedelta(days=366)
    # Both are due at once: the operator was away for a year.
    after = renew(made, NAMES, late)
    assert len(after.authorities) == 2
    assert trusts(made.bundle, after.serving.certificate, late)
    # The rule is what holds it: without it the new one signs at once.
    monkeypatch.setattr(certificates, "SETTLE", timedelta(0))
    assert not trusts(made.bundle, renew(made, NAMES, late).serving.certificate, late)


def test_after_everything_has_ended_everything_is_made_anew() -> None:
    made = renew(None, NAMES, BEGIN)
    late = BEGIN + timedelta(days=4000)
    after = renew(made, NAMES, late)
    assert trusts(after.bundle, after.serving.certificate, late)
    assert made.authorities[0] not in after.authorities


def test_a_secret_holds_all_of_it() -> None:
    made = renew(None, NAMES, BEGIN)
    two = renew(made, NAMES, BEGIN + timedelta(days=400))
    assert len(two.authorities) == 2
    for credentials in (made, two):
        assert from_secret_data(to_secret_data(credentials)) == credentials


@pytest.mark.parametrize("part", ["tls.crt", "tls.key", "ca.crt", "ca.key"])
@pytest.mark.parametrize("damage", ["gone", "", "not base64!", base64.b64encode(b"no PEM").decode(), "another's"])
def test_a_damaged_secret_is_none(part: str, damage: str) -> None:
    data = to_secret_data(renew(None, NAMES, BEGIN))
    other = to_secret_data(renew(None, NAMES, BEGIN))
    data[part] = other[part] if damage == "another's" else damage
    if damage == "gone":
        del data[part]
    held = from_secret_data(data)
    made = renew(held, NAMES, BEGIN)
    assert trusts(made.bundle, made.serving.certificate, BEGIN)
    assert made is not held


def held_secret(api: HeldApi) -> Credentials:
    secret = api.objects[SECRET.path("polarkv-system", "polarkv-webhook-tls")]
    assert secret["type"] == "kubernetes.io/tls"
    held = from_secret_data(secret["data"])
    assert held is not None
    return held


def published(api: HeldApi) -> bytes:
    return base64.b64decode(api.of_kind("MutatingWebhookConfiguration")[0]["webhooks"][0]["clientConfig"]["caBundle"])


def test_the_first_look_makes_and_publishes_and_the_second_writes_nothing() -> None:
    api = HeldApi(CONFIGURATION)
    source = SharedSecret(api, settings_for_tests())
    shown = source.current(BEGIN)
    assert trusts(published(api), shown.certificate, BEGIN, "localhost.polarkv-system.svc")
    before = len(api.calls)
    assert source.current(BEGIN) == shown
    assert [call.partition(" ")[0] for call in api.calls[before:]] == ["get", "get"]


def test_replicas_that_begin_at_once_show_the_same() -> None:
    api = HeldApi(CONFIGURATION)
    together = threading.Barrier(4)
    shown = []

    def hold(call: str) -> None:
        # All have read that there is nothing before the first one writes.
        if call.startswith("create "):
            together.wait(20)

    api.before = hold
    threads = [
        threading.Thread(target=lambda: shown.append(SharedSecret(api, settings_for_tests()).current(BEGIN)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(shown) == 4 and set(shown) == {held_secret(api).serving}
    assert published(api) == held_secret(api).bundle


def test_replicas_that_renew_at_once_show_the_same() -> None:
    api = HeldApi(CONFIGURATION)
    one, two = (SharedSecret(api, settings_for_tests()) for _ in range(2))
    first = one.current(BEGIN)
    late = BEGIN + timedelta(days=80)
    others: list[object] = []

    def intrude(call: str) -> None:
        # The other replica renews between this one's reading and its writing.
        if call.startswith("replace ") and not others:
            others.append(None)
            others[0] = two.current(late)

    api.before = intrude
    assert one.current(late) == others[0] != first
    assert held_secret(api).serving == others[0]


def test_a_replica_that_died_before_it_published_is_made_good_by_the_next_look() -> None:
    api = HeldApi()
    source = SharedSecret(api, settings_for_tests())
    with pytest.raises(ApiError, match="there is no MutatingWebhookConfiguration polarkv-webhook: install the chart's"):
        source.current(BEGIN)
    api.create(CONFIGURATION)
    shown = source.current(BEGIN)
    assert trusts(published(api), shown.certificate, BEGIN, "localhost")


def test_a_published_bundle_that_somebody_removed_comes_back() -> None:
    api = HeldApi(CONFIGURATION)
    source = SharedSecret(api, settings_for_tests())
    source.current(BEGIN)
    before = published(api)
    api.of_kind("MutatingWebhookConfiguration")[0]["webhooks"][0]["clientConfig"]["caBundle"] = ""
    source.current(BEGIN)
    assert published(api) == before


def test_a_secret_that_keeps_changing_ends_the_look(caplog: pytest.LogCaptureFixture) -> None:
    api = HeldApi(CONFIGURATION)
    name = SECRET.path("polarkv-system", "polarkv-webhook-tls")
    SharedSecret(api, settings_for_tests()).current(BEGIN)
    api.objects[name]["data"]["ca.key"] = ""

    def meddle(call: str) -> None:
        if call.startswith("replace "):
            api.objects[name]["metadata"]["resourceVersion"] += "0"

    api.before = meddle
    with caplog.at_level(logging.WARNING), pytest.raises(ApiError, match="keeps changing: 5 attempts"):
        SharedSecret(api, settings_for_tests()).current(BEGIN)
    assert "is damaged" in caplog.text
    assert "PRIVATE KEY" not in caplog.text


def keeper_of(folder: Path, now: Callable[[], datetime]) -> Keeper:
    return Keeper(Folder(folder), now)


def test_a_folder_is_read_at_every_look(tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path, lambda: BEGIN)
    with pytest.raises(PolarKVError, match="no certificate can be read there"):
        keeper.fetch()
    assert keeper.not_after is None and not keeper.is_valid
    made = [renew(None, NAMES, BEGIN).serving, renew(None, NAMES, BEGIN + HOUR).serving]
    for pair in made:
        (tmp_path / "tls.crt").write_bytes(pair.certificate)
        (tmp_path / "tls.key").write_bytes(pair.key)
        keeper.show(keeper.fetch())
        assert keeper.not_after == pair.parsed.not_valid_after_utc
    # Half written: the key is another one's. What was shown stays.
    (tmp_path / "tls.key").write_bytes(made[0].key)
    with pytest.raises(PolarKVError, match="do not go together"):
        keeper.show(keeper.fetch())
    assert keeper.not_after == made[1].parsed.not_valid_after_utc
