"""What is read of RDMA devices without a binding, how ends are paired, and what is said where something is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarkv_client import errors
from polarkv_client.cli.doctor_rdma import rdma_findings
from polarkv_client.cli.findings import Finding, Level
from polarkv_client.config import load_config
from polarkv_client.endpoints import RdmaEndpoint, RdmaPort, parse_rdma_endpoint
from polarkv_client.protocol.messages import NodeInfo
from polarkv_client.transport.select import Transports
from polarkv_client.transport.verbs import bindings, devices
from polarkv_client.transport.verbs.local import LocalDevice, LocalDevices, pair_rails
from tests.support.fake_rdma import LINK_LOCAL, MAPPED, FakeBinding, FakeDevice, sysfs_device

GOOD = {0: (LINK_LOCAL, "RoCE v2"), 1: (LINK_LOCAL, "IB/RoCE v1"), 2: (MAPPED, "IB/RoCE v1"), 3: (MAPPED, "RoCE v2")}


def test_the_address_is_the_routable_one(tmp_path: Path) -> None:
    sysfs_device(tmp_path, "mlx5_0", GOOD)
    (device,) = devices.seen(sysfs=tmp_path)
    assert (device.name, device.state, device.link, device.file) == ("mlx5_0", "active", "Ethernet", "uverbs0")
    gid = devices.pick_gid(device, None)
    assert (gid.number, gid.text, gid.kind) == (3, "192.168.7.2", "RoCE v2")
    assert devices.pick_gid(device, 0).text == LINK_LOCAL


def test_on_infiniband_it_is_the_first(tmp_path: Path) -> None:
    sysfs_device(tmp_path, "mlx5_0", {0: (LINK_LOCAL, "")}, link="InfiniBand")
    assert devices.pick_gid(devices.seen(sysfs=tmp_path)[0], None).number == 0


def test_an_address_far_behind_is_found_when_it_is_asked_for(tmp_path: Path) -> None:
    sysfs_device(tmp_path, "mlx5_0", {0: (LINK_LOCAL, "RoCE v2"), 200: (MAPPED, "RoCE v2")})
    assert [gid.number for gid in devices.seen(sysfs=tmp_path)[0].gids] == [0]
    assert devices.pick_gid(devices.seen(200, tmp_path)[0], 200).text == "192.168.7.2"


@pytest.mark.parametrize("index", [None, 9])
def test_without_an_address_it_says_which_there_are(tmp_path: Path, index: int | None) -> None:
    sysfs_device(tmp_path, "mlx5_0", {0: (LINK_LOCAL, "RoCE v2")})
    with pytest.raises(errors.Unavailable, match=r"mlx5_0 has no GID .* \(it has 0: fe80::1 \(RoCE v2\)\)"):
        devices.pick_gid(devices.seen(sysfs=tmp_path)[0], index)


def test_traffic_is_what_the_driver_counts(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    (port / "counters").mkdir(parents=True)
    (port / "hw_counters").mkdir()
    (port / "counters/port_xmit_data").write_text("10\n")
    (port / "hw_counters/rcvd_pkts").write_text("7\n")
    assert devices.traffic("mlx5_0", tmp_path) == {"sent_bytes": 40, "received_packets": 7}


def test_an_endpoint_is_read_as_it_is_written() -> None:
    endpoint = RdmaEndpoint("tcp://[fe80::2]:7700", (RdmaPort("mlx5_0", "10.0.0.1"), RdmaPort("mlx5_1", "fe80::3")))
    assert str(endpoint) == "rdma://[fe80::2]:7700/mlx5_0@10.0.0.1,mlx5_1@fe80::3"
    assert parse_rdma_endpoint(str(endpoint)) == endpoint
    for wrong in ("", "tcp://h:1/a@b", "rdma://h/a@b", "rdma://h:1", "rdma://h:1/a", "rdma://h:1/a@", "rdma://h:1/@b"):
        with pytest.raises(ValueError, match="use "):
            parse_rdma_endpoint(wrong)


def ends(names: list[str], monkeypatch: pytest.MonkeyPatch, routes: dict[str, str]) -> list[LocalDevice]:
    monkeypatch.setattr(devices, "source_address", lambda towards: routes.get(towards, ""))
    made = []
    for place, name in enumerate(names):
        raw = b"\0" * 10 + b"\xff\xff" + bytes([10, 0, 0, place + 1])
        made.append(LocalDevice(FakeDevice(name), devices.Gid(1, raw, "RoCE v2"), 0))
    return made


def rails(mine: list[LocalDevice], theirs: list[str]) -> list[tuple[str, str]]:
    pairs = pair_rails(mine, [RdmaPort(name, f"10.0.1.{place + 1}") for place, name in enumerate(theirs)])
    for device in mine:
        device.release()
    return [(device.name, port.device) for device, port in pairs]


@pytest.mark.parametrize(
    ("mine", "theirs", "routes", "expected"),
    [
        (["a"], ["x"], {}, [("a", "x")]),
        (["a", "b"], ["x", "y"], {}, [("a", "x"), ("b", "y")]),
        (["a", "b"], ["x", "y"], {"10.0.1.1": "10.0.0.2", "10.0.1.2": "10.0.0.1"}, [("b", "x"), ("a", "y")]),
        (["a", "b"], ["x"], {"10.0.1.1": "10.0.0.2"}, [("b", "x"), ("a", "x")]),
        (["a"], ["x", "y"], {}, [("a", "x"), ("a", "y")]),
        ([], ["x"], {}, []),
    ],
)
def test_rails(
    mine: list[str], theirs: list[str], routes: dict[str, str], expected: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert rails(ends(mine, monkeypatch, routes), theirs) == expected


def test_a_device_is_closed_when_its_last_user_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class User:
        def close(self) -> None:
            device.let_go(self)

    (device,) = ends(["a"], monkeypatch, {})
    fake = device.device
    assert isinstance(fake, FakeDevice)
    user = User()
    device.hold(user)
    device.release()
    assert not fake.closed
    user.close()
    assert fake.closed
    with pytest.raises(errors.Unavailable, match="a has been closed"):
        device.hold(user)


def test_without_a_binding_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "_WAYS", {"ibverbs": ("no_such_binding", "Binding")})
    assert bindings.choose().binding is None
    with pytest.raises(errors.Unavailable, match="ibverbs-providers"):
        bindings.need()
    monkeypatch.setattr(devices, "seen", lambda gid_index=None: [devices.Seen("mlx5_0", "active", "Ethernet", (), "")])
    local = LocalDevices()
    with pytest.raises(errors.Unavailable, match="no binding of libibverbs"):
        local.open()


def test_a_device_whose_port_has_gone_down_is_not_offered_until_it_is_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gid = devices.Gid(1, devices.raw_gid("10.0.0.1"), "RoCE v2")
    states = {"a": "active", "b": "active"}
    monkeypatch.setattr(
        devices, "seen", lambda _index=None: [devices.Seen(*each, "Ethernet", (gid,), "") for each in states.items()]
    )
    monkeypatch.setattr(bindings, "need", lambda _wanted: FakeBinding(FakeDevice("a"), FakeDevice("b")))
    local = LocalDevices()
    both = local.open()
    states["b"] = "down"
    assert local.open() == both[:1]
    states["a"] = "down"
    with pytest.raises(errors.Unavailable, match="a: its port is down; b: its port is down"):
        local.open()
    states |= {"a": "active", "b": "active"}
    assert local.open() == both
    local.close()


def test_a_machine_without_devices_says_so() -> None:
    if devices.seen():
        pytest.skip("this machine has RDMA devices")
    with pytest.raises(errors.Unavailable, match="has no RDMA device"):
        LocalDevices().open()


def doctor(root: Path, choice: bindings.Choice, monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    monkeypatch.setattr("resource.getrlimit", lambda what: (8 << 20, 8 << 20))
    monkeypatch.setattr("polarkv_client.cli.doctor_rdma.has_capability", lambda number: False)
    found = {finding.check: finding for finding in rdma_findings(root / "sys", root / "dev", choice)}
    for finding in found.values():
        assert finding.fix or finding.level is Level.OK
    return found


def test_the_doctor_on_a_machine_without_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor(tmp_path, bindings.Choice(None, {}), monkeypatch)
    assert {name: finding.level for name, finding in found.items()} == {"rdma": Level.OK, "memlock": Level.OK}


def test_the_doctor_on_a_machine_that_has_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sysfs_device(tmp_path / "sys", "mlx5_0", GOOD)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "uverbs0").touch()
    device = FakeDevice("mlx5_0")
    found = doctor(tmp_path, bindings.Choice(FakeBinding(device), {}), monkeypatch)
    assert [name for name, finding in found.items() if finding.level is not Level.OK] == ["memlock"]
    assert "ulimit -l unlimited" in found["memlock"].fix
    assert "3: 192.168.7.2 (RoCE v2)" in found["rdma mlx5_0 GID"].found
    assert "1TiB at once" in found["rdma mlx5_0 provider"].found
    assert device.closed


def test_the_doctor_on_a_machine_that_lacks_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sysfs_device(tmp_path / "sys", "mlx5_0", {0: (LINK_LOCAL, "RoCE v2")}, state="1: DOWN", interface="ens7")
    found = doctor(tmp_path, bindings.Choice(None, {"ibverbs": "not installed"}), monkeypatch)
    assert {name for name, finding in found.items() if finding.level is Level.WARN} == {
        "rdma mlx5_0", "rdma mlx5_0 GID", "rdma mlx5_0 file", "rdma library", "memlock",
    }  # fmt: skip
    assert "ip link set ens7 up" in found["rdma mlx5_0"].fix
    assert "ip address add" in found["rdma mlx5_0 GID"].fix
    assert "transport.resourceName" in found["rdma mlx5_0 file"].fix
    assert "ibverbs-providers" in found["rdma library"].fix


def test_the_doctor_where_the_provider_is_missing_or_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sysfs_device(tmp_path / "sys", "erdma_0", GOOD)
    nothing = doctor(tmp_path, bindings.Choice(FakeBinding(), {}), monkeypatch)["rdma erdma_0 provider"]
    assert (nothing.level, "ibverbs-providers" in nothing.fix) == (Level.WARN, True)
    little = FakeDevice("erdma_0", region_bytes=1 << 16)
    small = doctor(tmp_path, bindings.Choice(FakeBinding(little), {}), monkeypatch)["rdma erdma_0 provider"]
    assert (small.level, "less memory than 64GiB" in small.fix) == (Level.WARN, True)


@pytest.mark.parametrize(
    ("allowed", "offered", "here", "ways", "reason"),
    [
        ("auto", True, True, ["rdma", "tcp"], ""),
        ("auto", True, False, ["tcp"], "no rdma: this machine has none"),
        ("auto", False, True, ["tcp"], "no rdma: the node does not offer it"),
        ("rdma", True, True, ["rdma"], ""),
        ("rdma", True, False, [], "no rdma: this machine has none"),
        ("tcp", True, True, ["tcp"], ""),
    ],
)
def test_rdma_is_taken_where_both_ends_have_it(
    allowed: str, offered: bool, here: bool, ways: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(self: LocalDevices) -> list[LocalDevice]:
        if not here:
            raise errors.Unavailable("this machine has none")
        return []

    monkeypatch.setattr(LocalDevices, "open", opened)
    transports = Transports(load_config(endpoint="tcp://m:1", transport=allowed, environment={}), "here")
    rdma = "rdma://n:1/mlx5_0@10.0.0.1" if offered else ""
    node = NodeInfo("n", 1, 1, "Active", "tcp://n:1", "", "elsewhere", rdma)
    reasons: list[str] = []
    assert [transport.name for transport, _ in transports._candidates(node, reasons)] == ways
    assert [text for text in reasons if "rdma" in text] == ([reason] if reason else [])
    transports.close()
