"""What the doctor says of machines that lack something."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarkv_client.cli import doctor_checks as checks
from polarkv_client.cli.findings import Level


@pytest.mark.parametrize(
    ("release", "level"),
    [("4.19.0-amd64", Level.FAIL), ("5.10.0", Level.WARN), ("6.1.0-13", Level.OK), ("?", Level.FAIL)],
)
def test_kernels(release: str, level: Level) -> None:
    assert checks.check_kernel(release).level is level


def test_huge_pages_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"shmem_enabled": "always within_size advise [never] deny force", "enabled": "always [madvise] never"}
    monkeypatch.setattr(checks, "read_text", lambda path: texts.get(Path(path).name, "HugePages_Free:       0"))
    monkeypatch.setattr(checks, "has_capability", lambda number: False)
    finding = checks.check_huge_pages()
    assert finding.level is Level.WARN
    assert "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled" in finding.fix
    texts["shmem_enabled"] = "always within_size [advise] never deny force"
    assert checks.check_huge_pages().level is Level.OK


def test_a_directory_that_cannot_be_used() -> None:
    findings = list(checks.check_directory(Path("/proc/self/polarkv")))
    assert [finding.level for finding in findings] == [Level.FAIL]
    assert "--dir" in findings[0].fix


def test_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    found = {finding.check: finding for finding in checks.check_directory(tmp_path / "a" / "b")}
    assert str(tmp_path) in found["free space"].found
    assert found["O_DIRECT"].level in {Level.OK, Level.WARN}
    assert not (tmp_path / "a").exists()


def test_every_trouble_has_a_fix(tmp_path: Path) -> None:
    for finding in checks.machine_findings(tmp_path):
        assert finding.fix or finding.level is Level.OK, finding
