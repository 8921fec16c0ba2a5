"""What `polarkv calibrate` measures: an engine's prefill, and how fast this client stores and loads."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from polarkv_client.cli.admin_api import AdminClient
from polarkv_client.cli.bench import TO_REMOVE_S, Bench, measure
from polarkv_client.errors import ConfigurationError, PolarKVError, Unavailable
from polarkv_client.states import Tier
from polarkv_client.sync import SyncClient

_VOCABULARY = range(1000, 20_000)  # token ids that every model of the table has, and that mean nothing special
_TO_DISK_S = 30.0


@dataclass(frozen=True)
class Prefill:
    """Medians of the rounds. ``tokens_per_s`` is from the difference of two lengths, so that overhead cancels."""

    tokens_per_s: float
    overhead_s: float
    seconds: dict[int, float]


def measure_prefill(
    url: str, model: str, lengths: Sequence[int], rounds: int, *, http: httpx.Client,
    clock: Callable[[], float] = time.perf_counter, seed: int | None = None,
) -> Prefill:  # fmt: skip
    """Time the first token of prompts of random tokens, which no cache has, from an engine with OpenAI's API.

    Raises:
        Unavailable: the engine does not answer. PolarKVError: it refuses, or longer prompts are not slower.
    """
    short, long = min(lengths), max(lengths)
    if short == long or short < 1:
        raise ConfigurationError("--prompt-tokens", f"{short},{long}", "use two different lengths, such as 1024,8192")
    dice = random.Random(seed)
    name = model or _first_model(url, http)
    taken: dict[int, list[float]] = {short: [], long: []}
    _time_one(url, name, [dice.choice(_VOCABULARY) for _ in range(short)], http, clock)  # what is built once is built
    for _ in range(rounds):
        for length, seconds in taken.items():
            seconds.append(_time_one(url, name, [dice.choice(_VOCABULARY) for _ in range(length)], http, clock))
    medians = {length: statistics.median(seconds) for length, seconds in taken.items()}
    slope = (medians[long] - medians[short]) / (long - short)
    if slope <= 0:
        raise PolarKVError(f"{long} tokens took no longer than {short} ({medians}): use longer prompts or more rounds")
    return Prefill(1 / slope, medians[short] - slope * short, medians)


def _time_one(url: str, model: str, tokens: list[int], http: httpx.Client, clock: Callable[[], float]) -> float:
    body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
    began = clock()
    _answer(lambda: http.post(f"{url.rstrip('/')}/v1/completions", json=body), url)
    return clock() - began


def _first_model(url: str, http: httpx.Client) -> str:
    answer = _answer(lambda: http.get(f"{url.rstrip('/')}/v1/models"), url)
    try:
        return str(answer.json()["data"][0]["id"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise PolarKVError(f"{url} lists no model: say --engine-model") from None


def _answer(call: Callable[[], httpx.Response], url: str) -> httpx.Response:
    try:
        answer = call()
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise ConfigurationError("--engine", url, f"{error}: use http://HOST:PORT") from error
    except httpx.HTTPError as error:
        raise Unavailable(f"the engine at {url} does not answer: {error}") from error
    if answer.is_error:
        raise PolarKVError(f"the engine at {url} refused ({answer.status_code}): {answer.text[:200]}")
    return answer


@dataclass(frozen=True)
class Transfers:
    """Bytes/s, medians of the rounds; ``disk`` 0: not measured, and why."""

    store: float
    memory: float
    disk: float
    why: str


def measure_transfers(
    client: SyncClient, admin: AdminClient | None, chunk_bytes: int, batch: int, rounds: int,
    advance: Callable[[int], None] = lambda _: None,
) -> Transfers:  # fmt: skip
    """Store and load fresh chunks, comparing every byte; where there is an admin token, load them from disk as well.

    Raises:
        PolarKVError: bytes came back wrong, or chunks were not stored or not found again.
    """
    found = Bench(chunk_bytes, batch)
    keys: list[bytes] = []
    try:
        measure(client, found, rounds, advance, keys)
        if found.corrupted:
            raise PolarKVError(f"{found.corrupted} chunks came back with wrong bytes")
        if found.not_stored or found.missed:
            raise PolarKVError(
                f"{found.not_stored} chunks were not stored and {found.missed} not found again: rates would mean "
                "nothing; use fewer or smaller chunks, or a cluster that is less busy"
            )
        disk, why = _from_disk(client, admin, keys, chunk_bytes, batch)
    finally:
        if admin is not None and keys:
            admin.evict_within(keys, TO_REMOVE_S, purge=True)
    medians = found.medians()
    return Transfers(medians["store_gb_per_s"] * 1e9, medians["load_gb_per_s"] * 1e9, disk, why)


def _from_disk(
    client: SyncClient, admin: AdminClient | None, keys: list[bytes], chunk_bytes: int, batch: int
) -> tuple[float, str]:
    if admin is None:
        return 0.0, "no admin token: chunks cannot be sent to disk"
    if not admin.evict_within(keys, _TO_DISK_S, purge=False):
        return 0.0, f"the chunks were not on disk after {_TO_DISK_S:.0f} s"
    rates = []
    targets = [bytearray(chunk_bytes) for _ in range(batch)]
    for start in range(0, len(keys), batch):
        wanted = keys[start : start + batch]
        began = time.perf_counter()
        loaded = client.load(wanted, targets[: len(wanted)])
        took = time.perf_counter() - began
        if all(chunk.tier is Tier.DISK for chunk in loaded.chunks):
            rates.append(len(wanted) * chunk_bytes / took)
    if not rates:
        return 0.0, "no batch came from disk whole"
    return statistics.median(rates), ""
