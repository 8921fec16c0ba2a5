"""Which cluster a pod asks for: read from the API server within a moment, or from what was read a moment ago."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from polarkv_operator.api.cluster import API_VERSION, KIND, PolarKVCluster, parse
from polarkv_operator.api.errors import SpecInvalid
from polarkv_operator.clients.kube import ApiError, Kind, Object
from polarkv_operator.resources import names
from polarkv_operator.webhooks.injection import Connection, InjectionSettings, Skip, Skipped
from polarkv_operator.webhooks.kube_api import Reads

CLUSTER = Kind(API_VERSION, KIND)
# A Deployment's pods come in bursts; one reading serves them.
FRESH_S = 2.0
# While the API server does not answer, what is known is better than nothing.
STALE_S = 600.0
MOST_REMEMBERED = 1024
MOST_READING = 32
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """What a pod gets from a cluster."""

    connection: Connection
    settings: InjectionSettings


class Clusters:
    """Finds clusters. Used in one event loop."""

    def __init__(
        self,
        reader: Reads,
        image: str,
        lookup_s: float,
        now: Callable[[], float],
    ) -> None:
        """``image`` is for clusters that name none; ``now`` is a monotonic clock in seconds."""
        self._reader = reader
        self._image = image
        self._lookup_s = lookup_s
        self._now = now
        self._threads = ThreadPoolExecutor(8, "clusters")
        self._known: OrderedDict[tuple[str, str], tuple[float, Object | None]] = OrderedDict()
        self._reading: dict[tuple[str, str], asyncio.Future[Object | None]] = {}

    def close(self) -> None:
        """Start no more readings."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def find(self, namespace: str, name: str) -> Target:
        """What a pod in ``namespace`` that asks for cluster ``name`` gets.

        Raises:
            Skipped: nothing; says why.
        """
        body = await self._body(namespace, name)
        if body is None:
            raise Skipped(
                Skip.CLUSTER_NOT_FOUND,
                f"there is no {KIND} {name!r} in namespace {namespace!r}; a pod uses a cluster of its own namespace",
            )
        try:
            return target(parse(body), self._image)
        except SpecInvalid as error:
            raise Skipped(Skip.CLUSTER_NOT_READ, f"{KIND} {name!r} is not valid: {error}") from None

    async def _body(self, namespace: str, name: str) -> Object | None:
        key = (namespace, name)
        known = self._known.get(key)
        if known is not None and self._now() - known[0] < FRESH_S:
            return known[1]
        try:
            async with asyncio.timeout(self._lookup_s):
                return await asyncio.shield(self._read(key))
        except (ApiError, TimeoutError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            _log.warning("%s/%s cannot be read: %s", namespace, name, why)
            if known is not None and self._now() - known[0] < STALE_S:
                return known[1]
            raise Skipped(Skip.CLUSTER_NOT_READ, f"{KIND} {name!r} cannot be read: {why}") from None

    def _read(self, key: tuple[str, str]) -> asyncio.Future[Object | None]:
        """One reading at a time of each cluster, however many ask."""
        if (reading := self._reading.get(key)) is not None:
            return reading
        if len(self._reading) >= MOST_READING:
            raise ApiError(0, f"{MOST_READING} clusters are being read already")
        future = asyncio.get_running_loop().run_in_executor(self._threads, self._reader.get, CLUSTER, *key)
        self._reading[key] = future
        future.add_done_callback(lambda done: self._note(key, done))
        return future

    def _note(self, key: tuple[str, str], done: asyncio.Future[Object | None]) -> None:
        del self._reading[key]
        if done.cancelled() or done.exception() is not None:
            return
        self._known[key] = (self._now(), done.result())
        self._known.move_to_end(key)
        while len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)


def target(cluster: PolarKVCluster, image: str) -> Target:
    """What a cluster's pods get.

    Raises:
        Skipped: the cluster does not want injection.
    """
    injection = cluster.spec.injection
    if not injection.enabled:
        raise Skipped(Skip.DISABLED, f"spec.injection.enabled of {KIND} {cluster.name!r} is false")
    connection = Connection(
        cluster.name,
        names.endpoint(cluster),
        names.client_secret(cluster),
        injection.tenant,
        cluster.spec.cache.chunk_tokens,
    )
    settings = InjectionSettings(
        injection.image or cluster.spec.image or image,
        cluster.spec.image_pull_policy.value,
        tuple(secret.name for secret in cluster.spec.image_pull_secrets),
    )
    return Target(connection, settings)
