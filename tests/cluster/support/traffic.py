"""What a pod of an application runs: stores chunks, or loads them once or for a while, and prints one line of JSON.

The file is passed to a pod's Python as text; only the installed client library is there. Arguments: what to do (store,
load), number of chunks, bytes of each, seconds to go on for (0: once) unless somebody makes the file ENOUGH before.
"""

import hashlib
import json
import os
import sys
import time

from polarkv_client.sync import SyncClient

WHAT = sys.argv[1]
CHUNKS, CHUNK_BYTES, SECONDS = (int(word) for word in sys.argv[2:])
BATCH = 16
ENOUGH = "/tmp/enough"


def key(number: int) -> bytes:
    return hashlib.sha256(f"chunk {number}".encode()).digest()


def payload(number: int) -> bytes:
    return hashlib.shake_128(f"bytes {number}".encode()).digest(CHUNK_BYTES)


def store(client: SyncClient, batch: list[int], found: dict[str, int]) -> None:
    found["stored"] += client.store([key(n) for n in batch], [payload(n) for n in batch]).stored


def load(client: SyncClient, batch: list[int], found: dict[str, int]) -> None:
    buffers = [bytearray(CHUNK_BYTES) for _ in batch]
    chunks = client.load([key(n) for n in batch], buffers).chunks
    found["hits"] += sum(chunk.hit for chunk in chunks)
    found["wrong"] += sum(
        chunk.hit and buffer != payload(n) for n, buffer, chunk in zip(batch, buffers, chunks, strict=True)
    )


def main() -> None:
    """Work through all chunks, once or until time is up."""
    found = {"stored": 0, "hits": 0, "wrong": 0, "rounds": 0}
    ends = time.monotonic() + SECONDS
    with SyncClient.connect(deadline_ms=20000) as client:
        while True:
            for start in range(0, CHUNKS, BATCH):
                batch = list(range(start, min(start + BATCH, CHUNKS)))
                (store if WHAT == "store" else load)(client, batch, found)
            found["rounds"] += 1
            if time.monotonic() >= ends or os.path.exists(ENOUGH):
                break
    print(json.dumps(found))


main()
