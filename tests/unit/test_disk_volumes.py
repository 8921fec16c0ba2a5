"""Directories as volumes: who may use them, and what is noticed when one is not what it was."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.disk.settings import DiskSettings
from polarkv_dataplane.disk.volumes import IDENTITY_FILE, VolumeSet
from tests.support.cache_node import secret_file


def opened(tmp_path: Path, *names: str, node: str = "node-1", require_mount: bool = False) -> VolumeSet:
    return VolumeSet(node, [tmp_path / name for name in names], require_mount)


def refused(tmp_path: Path, *names: str, node: str = "node-1", require_mount: bool = False) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        opened(tmp_path, *names, node=node, require_mount=require_mount)
    return caught.value


def test_a_set_is_made_once_and_found_again_in_its_own_order(tmp_path: Path) -> None:
    volumes = opened(tmp_path, "a", "b", "c")
    assert [folder.name for folder in volumes.folders] == ["a", "b", "c"]
    identity = json.loads((tmp_path / "b" / IDENTITY_FILE).read_text())
    assert identity["node"] == "node-1" and identity["volumes"][1] == identity["volume"]
    volumes.close()
    again = opened(tmp_path, "c", "a", "b")  # keys stay where they are, whatever the order of the options
    assert [folder.name for folder in again.folders] == ["a", "b", "c"]
    again.close()


def test_a_second_opener_is_refused(tmp_path: Path) -> None:
    first = opened(tmp_path, "a", "b")
    error = refused(tmp_path, "b")
    assert "another process uses this directory" in str(error)
    first.close()
    opened(tmp_path, "a", "b").close()


def test_a_refused_set_gives_its_locks_back(tmp_path: Path) -> None:
    first = opened(tmp_path, "b")
    refused(tmp_path, "a", "b")
    opened(tmp_path, "a").close()
    first.close()


def test_a_missing_mount_is_noticed(tmp_path: Path) -> None:
    opened(tmp_path, "a", "b").close()
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "b").mkdir()  # the empty mount point
    error = refused(tmp_path, "a", "b")
    assert error.field == "directories.1"
    assert "missing: mount it there" in str(error)
    assert list((tmp_path / "b").iterdir()) == []
    assert "missing" in str(refused(tmp_path, "a"))


def test_a_mount_can_be_required(tmp_path: Path) -> None:
    if any(os.path.ismount(path) for path in (tmp_path, *tmp_path.parents) if path != Path("/")):
        pytest.skip("this machine's temporary files lie on a mount of their own")
    error = refused(tmp_path, "a", require_mount=True)
    assert "no file system is mounted there" in str(error)
    assert not (tmp_path / "a").exists()


def test_another_nodes_directory_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, "a").close()
    assert "belongs to the cache node 'node-1', this is 'node-2'" in str(refused(tmp_path, "a", node="node-2"))


def test_another_sets_directory_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, "a", "b").close()
    opened(tmp_path, "c", "d").close()
    assert "another set" in str(refused(tmp_path, "a", "d"))
    assert "leave this directory out" in str(refused(tmp_path, "a", "b", "e"))


def test_a_copy_of_a_volume_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, "a", "b").close()
    shutil.rmtree(tmp_path / "b")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert "another set" in str(refused(tmp_path, "a", "b"))


@pytest.mark.parametrize("cut_after", [1, 2, 3])
def test_a_set_whose_making_was_cut_off_is_made_or_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_after: int
) -> None:
    from polarkv_dataplane.disk import volumes

    real = volumes.Identity.write
    calls: list[Path] = []

    def write(self: volumes.Identity, folder: Path) -> None:
        if len(calls) == cut_after:
            raise KeyboardInterrupt
        calls.append(folder)
        real(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(volumes.Identity, "write", write)
        with pytest.raises(KeyboardInterrupt):
            opened(tmp_path, "a", "b")
    opened(tmp_path, "a", "b").close()
    for name in "ab":
        assert json.loads((tmp_path / name / IDENTITY_FILE).read_text())["complete"]


def test_somebody_elses_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("mine")
    assert "'thesis.tex'" in str(refused(tmp_path, "a"))
    (tmp_path / "b" / "lost+found").mkdir(parents=True)  # a new ext4 file system has it
    opened(tmp_path, "b").close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 2}'])
def test_an_unreadable_identity_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / IDENTITY_FILE).write_text(text)
    error = refused(tmp_path, "a")
    assert error.field == "directories.0"
    assert IDENTITY_FILE in str(error)


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused(tmp_path, "file").field == "directories.0"
    assert refused(tmp_path, "file/below").field == "directories.0"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"node": "/"}, "node"),
        ({"manager": "http://x"}, "manager"),
        ({"slab_socket": ""}, "slab_socket"),
        ({"directories": []}, "directories"),
        ({"directories": ["x", "y", "./x"]}, "directories.2"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"io_threads": 0}, "io_threads"),
        ({"queue_length": 0}, "queue_length"),
        ({"surprise": 0}, "surprise"),
    ],
)
def test_a_wrong_setting_names_its_field(tmp_path: Path, change: dict[str, object], field: str) -> None:
    values: dict[str, object] = {
        "node": "n", "manager": "tcp://127.0.0.1:1", "secret_file": secret_file(tmp_path),
        "slab_socket": "/tmp/x", "directories": [tmp_path], "capacity_bytes": 1 << 20,
    }  # fmt: skip
    with pytest.raises(ConfigurationError) as caught:
        DiskSettings(**(values | change))
    assert caught.value.field == field
    assert all(info.description for info in DiskSettings.model_fields.values())
