"""What a client pod runs: stores more than memory holds, loads it, compares every byte, and prints one line of JSON.

The file is passed to a pod's Python as text; only the installed client library is there.
"""

import hashlib
import json
import sys

from polarkv_client.states import Tier
from polarkv_client.sync import SyncClient

CHUNKS, CHUNK_BYTES, BATCH = (int(word) for word in sys.argv[1:])


def key(number: int) -> bytes:
    return hashlib.sha256(f"chunk {number}".encode()).digest()


def payload(number: int) -> bytes:
    return hashlib.shake_128(f"bytes {number}".encode()).digest(CHUNK_BYTES)


def main() -> None:
    """Store and load in batches."""
    keys = [key(number) for number in range(CHUNKS)]
    batches = [range(start, min(start + BATCH, CHUNKS)) for start in range(0, CHUNKS, BATCH)]
    found = {"stored": 0, "memory": 0, "disk": 0, "hits": 0, "wrong": 0}
    with SyncClient.connect(deadline_ms=20000) as client:
        for batch in batches:
            result = client.store([keys[n] for n in batch], [payload(n) for n in batch])
            found["stored"] += result.stored
        # The newest first: those are still in memory.
        for batch in reversed(batches):
            asked = [keys[n] for n in batch]
            tiers = client.exists(asked)
            buffers = [bytearray(CHUNK_BYTES) for _ in batch]
            loaded = client.load(asked, buffers)
            for number, tier, buffer, chunk in zip(batch, tiers, buffers, loaded.chunks, strict=True):
                if chunk.hit:
                    found["hits"] += 1
                    found["memory"] += tier is Tier.MEMORY
                    found["disk"] += tier is Tier.DISK
                    found["wrong"] += buffer != payload(number)
        transports = sorted({node.transport for node in client.status().nodes})
    print(json.dumps({**found, "transports": transports}))


main()
