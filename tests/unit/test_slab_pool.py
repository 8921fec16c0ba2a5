"""The pool: what it is made of, what it refuses, and that nothing of it stays behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.slab import machine, pool
from polarkv_dataplane.slab.settings import SlabSettings
from tests.support.cache_node import MIB, secret_file

SIZE = 8 * MIB
SHM = Path("/dev/shm")


def settings(tmp_path: Path, **changes: object) -> SlabSettings:
    values = {"node": "n", "manager": "tcp://127.0.0.1:1", "secret_file": secret_file(tmp_path), "memory_bytes": SIZE}
    return SlabSettings(**(values | changes))


def made(tmp_path: Path, **changes: object) -> pool.Pool:
    """A pool; skips the test when this machine cannot make that kind."""
    try:
        return pool.create(settings(tmp_path, **changes))
    except ConfigurationError as error:
        pytest.skip(f"not possible here: {error}")


def on_tmpfs(path: Path) -> bool:
    return path.is_dir() and machine.filesystem_type(path) == machine.TMPFS_MAGIC and os.access(path, os.W_OK)


@pytest.mark.parametrize("kind", ["tmpfs", "hugetlb", "off", "auto"])
def test_a_pool_of_each_kind_is_shared_memory(tmp_path: Path, kind: str) -> None:
    made_pool = made(tmp_path, huge_pages=kind)
    made_pool.prefault(lambda: False)
    assert made_pool.prefaulted_bytes == SIZE
    made_pool.view[SIZE - 5 :] = b"hello"
    import mmap

    with mmap.mmap(made_pool.fd, SIZE) as other:  # as another process maps it
        assert other[SIZE - 5 :] == b"hello"
    if made_pool.can_sendfile:
        assert os.pread(made_pool.fd, 5, SIZE - 5) == b"hello"
        assert os.pwrite(made_pool.fd, b"HELLO", 0) == 5
        assert bytes(made_pool.view[:5]) == b"HELLO"
    else:
        assert kind == "hugetlb" or made_pool.kind == "hugetlb"
    os.close(made_pool.fd)


def test_auto_takes_the_private_tmpfs_where_it_is_allowed(tmp_path: Path) -> None:
    made(tmp_path, huge_pages="tmpfs")
    assert pool.create(settings(tmp_path)).kind == "tmpfs-huge"


def test_auto_falls_back_to_plain_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(machine, "mount_tmpfs", no)
    monkeypatch.setattr(os, "MFD_HUGETLB", 0)
    monkeypatch.setattr(os, "MFD_HUGE_2MB", 1 << 30)  # no such size: as when none are reserved
    assert pool.create(settings(tmp_path)).kind == "memfd"
    with pytest.raises(ConfigurationError, match=r"huge_pages='tmpfs'.*CAP_SYS_ADMIN"):
        pool.create(settings(tmp_path, huge_pages="tmpfs"))
    with pytest.raises(ConfigurationError, match=r"huge_pages='hugetlb'.*vm.nr_hugepages"):
        pool.create(settings(tmp_path, huge_pages="hugetlb"))


def test_more_than_the_machine_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"memory_bytes=\d+: .*available.*use less"):
        pool.create(settings(tmp_path, memory_bytes=1 << 50))


def test_more_than_the_control_group_allows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cgroup_limits", lambda: iter([1 << 40, 4 * MIB]))
    with pytest.raises(ConfigurationError, match="control group's memory limit is 4194304 bytes"):
        pool.create(settings(tmp_path))


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/app/slab", "sys/fs/cgroup/app/memory.max"),
        ("4:memory:/app/slab", "sys/fs/cgroup/memory/app/slab/memory.limit_in_bytes"),
        ("4:cpu,memory:/seen/only/outside", "sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ],
)
def test_limits_of_both_control_group_versions_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, file: str
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"1:name=systemd:/x\n{line}\n")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("123456\n")

    class Rooted(type(Path())):  # type: ignore[misc]
        def read_text(self, *args: object, **kwargs: object) -> str:
            with open(tmp_path / str(self).lstrip("/"), encoding="utf-8") as opened:
                return opened.read()

    monkeypatch.setattr(machine, "Path", Rooted)
    assert list(machine._cgroup_limits()) == [123456]


@pytest.mark.parametrize("as_file", [True, False])
def test_a_given_path_is_used_and_left_empty(tmp_path: Path, as_file: bool) -> None:
    if not on_tmpfs(SHM):
        pytest.skip("no writable tmpfs at /dev/shm")
    folder = SHM / f"polarkv-test-{os.getpid()}"
    folder.mkdir()
    try:
        path = folder / "pool" if as_file else folder
        if as_file:
            path.touch()  # an empty file of that name is taken to be meant for this
        made_pool = pool.create(settings(tmp_path, pool_path=path))
        assert made_pool.kind == "tmpfs-path"
        made_pool.view[:4] = b"here"
        assert os.pread(made_pool.fd, 4, 0) == b"here"
        assert list(folder.iterdir()) == []
        again = pool.create(settings(tmp_path, pool_path=path))
        assert bytes(again.view[:4]) == b"\0\0\0\0"  # another life's memory is never seen again
        (folder / "data").write_bytes(b"mine")
        with pytest.raises(ConfigurationError, match="content"):
            pool.create(settings(tmp_path, pool_path=folder / "data"))
        assert (folder / "data").read_bytes() == b"mine"
        (folder / "data").unlink()
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_a_path_that_is_no_memory_is_refused(tmp_path: Path) -> None:
    if machine.filesystem_type(tmp_path) in (machine.TMPFS_MAGIC, machine.HUGETLBFS_MAGIC):
        pytest.skip("this machine's temporary files are in memory")
    with pytest.raises(ConfigurationError, match=r"pool_path.*neither on tmpfs nor on hugetlbfs"):
        pool.create(settings(tmp_path, pool_path=tmp_path / "pool"))
    with pytest.raises(ConfigurationError, match=r"pool_path.*No such file"):
        pool.create(settings(tmp_path, pool_path=tmp_path / "no" / "pool"))


def test_a_given_file_system_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not on_tmpfs(SHM):
        pytest.skip("no writable tmpfs at /dev/shm")
    real = os.statvfs(SHM)
    small = os.statvfs_result((real.f_bsize, real.f_frsize, 100, 10, 10, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    with pytest.raises(ConfigurationError, match=r"has 40960 bytes free: use less, or enlarge it"):
        pool.create(settings(tmp_path, pool_path=SHM))


def test_memory_that_runs_out_while_prefaulting_is_an_error_not_a_fault(tmp_path: Path) -> None:
    made(tmp_path, huge_pages="tmpfs")
    root = machine.mount_tmpfs(4 * MIB, b"never")
    fd = os.open("pool", os.O_RDWR | os.O_CREAT, 0o600, dir_fd=root)
    os.ftruncate(fd, SIZE)
    small = pool.Pool(fd, SIZE, "tmpfs-path")
    with pytest.raises(ConfigurationError, match=r"memory_bytes.*No space left"):
        small.prefault(lambda: False)
    os.close(fd)
    os.close(root)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"node": ""}, "node"),
        ({"node": "a b"}, "node"),
        ({"manager": "localhost:1"}, "manager"),
        ({"memory_bytes": 1000}, "memory_bytes"),
        ({"memory_bytes": "much"}, "memory_bytes"),
        ({"slab_bytes": 5000}, "slab_bytes"),
        ({"slab_bytes": SIZE + 4096}, "slab_bytes"),
        ({"listen_port": 70_000}, "listen_port"),
        ({"listen_host": ""}, "listen_host"),
        ({"unix_socket": "relative"}, "unix_socket"),
        ({"unix_socket": "/" + "x" * 120}, "unix_socket"),
        ({"huge_pages": "some"}, "huge_pages"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_wrong_setting_names_its_field(tmp_path: Path, change: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings(tmp_path, **change)
    assert caught.value.field == field
    assert caught.value.fix


def test_slabs_are_an_eighth_within_bounds(tmp_path: Path) -> None:
    assert settings(tmp_path, memory_bytes=MIB).slab_size_bytes == MIB
    assert settings(tmp_path, memory_bytes=64 * MIB).slab_size_bytes == 8 * MIB
    assert settings(tmp_path, memory_bytes=1 << 40).slab_size_bytes == 1 << 30
    odd = settings(tmp_path, memory_bytes=10 * MIB + 5000, slab_bytes=3 * MIB)
    assert odd.pool_bytes == 9 * MIB


def test_every_setting_is_described() -> None:
    described: Callable[[str], str | None] = lambda name: SlabSettings.model_fields[name].description  # noqa: E731
    assert all(described(name) for name in SlabSettings.model_fields)


@pytest.mark.parametrize(("content", "text"), [(None, "No such file"), (b"short", "5 bytes"), (b"x" * 5000, "bytes")])
def test_a_bad_secret_file_is_refused(tmp_path: Path, content: bytes | None, text: str) -> None:
    from polarkv_dataplane.runtime import secrets

    path = tmp_path / "cluster-secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=text) as caught:
        secrets.load(path)
    assert caught.value.field == "secret_file"
    derived = secrets.derive(b"s" * 32)
    assert derived.node_token not in repr(derived)


def test_reserved_pages_of_the_paths_own_size_are_beside_the_control_groups_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pod: its limit on memory does not count huge pages, and theirs need not be the machine's default size."""
    reserved = tmp_path / "hugepages-1048576kB"
    reserved.mkdir()
    page = os.statvfs_result((1 << 30, 1 << 30, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(machine, "HUGE_PAGES", tmp_path)
    monkeypatch.setattr(machine, "memory_limit", lambda: (MIB, "the control group's memory limit"))
    monkeypatch.setattr(machine, "filesystem_type", lambda _: machine.HUGETLBFS_MAGIC)
    monkeypatch.setattr(os, "statvfs", lambda _: page)
    monkeypatch.setattr(pool, "_from_path", lambda path, size_bytes: (path, size_bytes))
    wanted = settings(tmp_path, memory_bytes=2 << 30, pool_path=tmp_path)
    for free, fits in (("1\n", False), ("2\n", True)):
        (reserved / "free_hugepages").write_text(free, encoding="ascii")
        if fits:
            assert pool.create(wanted) == (tmp_path, 2 << 30)
            continue
        with pytest.raises(ConfigurationError, match="control group"):
            pool.create(wanted)
