"""The blocking face of the client: the same operations on the calling thread, without an event loop in between."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType

from polarkv_client.client import Operations, as_config
from polarkv_client.config import ClientConfig
from polarkv_client.keys import Namespace
from polarkv_client.results import ClientStatus, LoadResult, StoreResult
from polarkv_client.states import Tier


class SyncClient:
    """Stores and loads KV chunks. Safe for several threads; each process needs its own, made after the fork.

    Bad arguments raise ConfigurationError; whatever goes wrong with the cache is an outcome in the result. Every call
    ends within ``deadline_ms`` (the configuration's when it is not given) plus at most 0.1 s and a piece's copy.
    """

    def __init__(self, config: ClientConfig) -> None:
        self._operations = Operations(config)

    @classmethod
    def connect(cls, connection: ClientConfig | str | os.PathLike[str] | None = None, **settings: object) -> SyncClient:
        """A client for the cluster at ``connection``: a configuration, a connection file or folder, or settings.

        An unreachable manager is no error: the client answers with misses and goes on trying in the background.

        Raises:
            ConfigurationError: a setting is wrong.
            VersionMismatch, GoldenMismatch, Unauthorized: this client can never be served there.
        """
        client = cls(as_config(connection, settings))
        try:
            client._operations.connect(client._operations.scope(None))
        except BaseException:
            client.close()
            raise
        return client

    def load_kv(
        self, namespace: Namespace, tokens: Sequence[int], buffers: Sequence[object],
        extras: Mapping[int, bytes] | None = None, deadline_ms: int | None = None,
    ) -> LoadResult:  # fmt: skip
        """Load the longest prefix of ``tokens`` that is cached.

        Args:
            tokens: token ids; a rest shorter than a chunk is ignored.
            buffers: one a whole chunk, each a writable buffer or a list of them (see :mod:`polarkv_client.buffers`).
            extras: by chunk index, bytes that enter the key there (an image's hash).

        Returns:
            ``tokens_loaded`` and an outcome a chunk. Chunks behind the first miss do not count. Buffers of chunks
            that are no hit may hold anything.
        """
        return self._operations.load_kv(namespace, tokens, buffers, self._operations.scope(deadline_ms), extras)

    def store_kv(
        self, namespace: Namespace, tokens: Sequence[int], buffers: Sequence[object],
        extras: Mapping[int, bytes] | None = None, deadline_ms: int | None = None,
    ) -> StoreResult:  # fmt: skip
        """Store the whole chunks of ``tokens``, as :meth:`load_kv` names them. What is there already is skipped.

        The buffers must not change until the call returns: a change in between can be stored, with a checksum that
        fits it.
        """
        return self._operations.store_kv(namespace, tokens, buffers, self._operations.scope(deadline_ms), extras)

    def load(self, keys: Sequence[bytes], buffers: Sequence[object], deadline_ms: int | None = None) -> LoadResult:
        """Load every key that is there into its buffer, wherever the misses lie.

        A chunk that was stored with another length than its buffer has is a miss. Buffers of chunks that are no hit
        may hold anything.
        """
        return self._operations.load(keys, buffers, self._operations.scope(deadline_ms))

    def store(self, keys: Sequence[bytes], buffers: Sequence[object], deadline_ms: int | None = None) -> StoreResult:
        """Store each buffer under its key."""
        return self._operations.store(keys, buffers, self._operations.scope(deadline_ms))

    def match_prefix(self, keys: Sequence[bytes], deadline_ms: int | None = None) -> list[Tier]:
        """Where each chunk of the longest cached prefix lies. Nothing is locked: a later load may miss."""
        return self._operations.match_prefix(keys, self._operations.scope(deadline_ms))

    def exists(self, keys: Sequence[bytes], deadline_ms: int | None = None) -> list[Tier]:
        """Where each key lies; NONE (which is false) if it is not there, or the cache does not answer."""
        return self._operations.exists(keys, self._operations.scope(deadline_ms))

    def prefetch(self, keys: Sequence[bytes], deadline_ms: int | None = None) -> bool:
        """Ask that these keys be brought from disk to memory. Returns whether the manager took note; does not wait."""
        return self._operations.prefetch(keys, self._operations.scope(deadline_ms))

    def status(self) -> ClientStatus:
        """Whether it is connected, how each cache node is reached and why, and what was counted."""
        return self._operations.status()

    def close(self) -> None:
        """Give everything back. Operations that still run on other threads end as misses."""
        self._operations.close()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
