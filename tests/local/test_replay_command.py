"""`polarkv replay` against a real slab server: what it reports and how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarkv_client.cli.main import run
from polarkv_client.cli.trace import generate_trace
from tests.support.slab_process import start_slab
from tests.support.small_manager import SmallManager

SEED, REQUESTS = 2, 150


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("replay")
    slab = start_slab(folder)
    manager = SmallManager([slab.node()])
    path = folder / "connection.json"
    path.write_text(json.dumps({"endpoint": manager.endpoint, "token": ""}))
    yield path
    manager.close()
    slab.close()


def replay(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["replay", "--json", "--block-bytes", "1000", "--concurrency", "1", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_repeated_blocks_hit_and_a_second_replay_finds_everything(
    connection: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--generate", str(SEED), "--limit", str(REQUESTS), "--connection", str(connection), "--namespace", "one"]
    blocks = sum(len(request.hash_ids) for request in generate_trace(SEED, REQUESTS))
    code, report = replay(capsys, *options)
    assert code == 0
    assert (report["requests"], report["blocks"], report["corrupted"]) == (REQUESTS, blocks, 0)
    assert report["hits"] == report["repeated"] > REQUESTS // 2
    assert report["stored"] == blocks - report["repeated"]
    assert report["bytes_stored"] == report["stored"] * 1000

    code, report = replay(capsys, *options)
    assert (code, report["memory_hits"], report["stored"]) == (0, blocks, 0)


def test_a_trace_file_is_replayed_up_to_its_limit(
    connection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, %d]}\n'
    (tmp_path / "t.jsonl").write_text("".join(line % (place + 2) for place in range(9)))
    code, report = replay(capsys, str(tmp_path / "t.jsonl"), "--limit", "4", "--connection", str(connection))
    assert (code, report["requests"], report["hits"], report["stored"]) == (0, 4, 3, 5)


def test_people_get_a_table(connection: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "--generate", "1", "--limit", "3", "--connection", str(connection)]) == 0
    assert "Replay of 3 requests" in capsys.readouterr().out


def test_a_bad_line_is_found_before_anything_is_stored(
    connection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}'
    (tmp_path / "t.jsonl").write_text(f"{good}\n{good[:-1]}\n")
    code, answer = replay(capsys, str(tmp_path / "t.jsonl"), "--connection", str(connection))
    assert code == 2
    assert "t.jsonl, line 2" in answer["error"]["field"]


@pytest.mark.parametrize("arguments", [[], ["t.jsonl", "--generate", "1"], ["--generate", "1", "--limit", "0"]])
def test_wrong_usage_ends_with_two(arguments: list[str], connection: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = replay(capsys, *arguments, "--connection", str(connection))
    assert (code, answer["error"]["exit_code"]) == (2, 2)


def test_without_a_manager_it_ends_with_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = SmallManager()
    gone.close()
    (tmp_path / "connection.json").write_text(json.dumps({"endpoint": gone.endpoint, "token": ""}))
    code, answer = replay(capsys, "--generate", "1", "--limit", "1", "--connection", str(tmp_path))
    assert (code, answer["error"]["kind"]) == (3, "Unavailable")
