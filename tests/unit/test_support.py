"""The tests' own helpers."""

import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from tests.support.waiting import wait_until, wait_until_async


def test_waiting_returns_the_first_true_answer() -> None:
    answers = iter([0, 0, 7])
    assert wait_until(lambda: next(answers), "seven", every_s=0.001) == 7


def test_waiting_ends_at_its_deadline() -> None:
    with pytest.raises(TimeoutError, match=r"0\.01 s for a miracle; last answer: False"):
        wait_until(lambda: False, "a miracle", timeout_s=0.01, every_s=0.001)


@pytest.mark.asyncio
async def test_waiting_in_a_loop_ends_at_its_deadline() -> None:
    async def probe() -> int:
        return 0

    with pytest.raises(TimeoutError, match="a miracle"):
        await wait_until_async(probe, "a miracle", timeout_s=0.01, every_s=0.001)


@pytest.mark.postgres
@pytest.mark.asyncio
async def test_each_test_gets_an_empty_database(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url, timeout=10)
    try:
        assert await connection.fetchval("select count(*) from pg_tables where schemaname = 'public'") == 0
    finally:
        await connection.close()


LEAKS = """
import subprocess
def test_that_forgets_its_process():
    subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "side by side"])
def test_a_run_that_leaves_a_process_behind_fails(tmp_path: Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "test_leak.py").write_text(LEAKS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", "/dev/null", *workers, str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == 1, run.stdout
    assert "1 passed" in run.stdout
    assert "left this process running" in run.stdout
