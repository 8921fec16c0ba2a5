"""Which engines' chunks fit each other: the namespace of an engine, and fingerprints of weights and adapters.

Two engines share chunks only if all of a namespace is equal. What is in doubt belongs in it: a namespace too narrow
costs hits, one too wide gives wrong tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from polarkv_client.connectors.guard import complaints
from polarkv_client.connectors.settings import ConnectorConfig
from polarkv_client.keys import Namespace

log = logging.getLogger(__name__)
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz")
_CONFIGURATION = (
    "config.json", "adapter_config.json", "params.json", "hf_quant_config.json", "quantize_config.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
_ADAPTERS = 4096
_HEAD_BYTES = 1 << 20
_SAMPLE_BYTES = 4096
_SAMPLES = 32
# What frameworks write into configurations without a change of what is computed.
_NOT_OF_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})


def engine_namespace(
    config: ConnectorConfig,
    *,
    engine: str,
    model: str,
    weights_fingerprint: str,
    kv_dtype: str,
    layout: Mapping[str, object],
    page_size: int,
    chunk_tokens: int | None = None,
    tp: tuple[int, int] = (0, 1),
    pp: tuple[int, int] = (0, 1),
) -> Namespace:
    """The namespace of one rank of an engine, with the configuration's overrides.

    Args:
        model: as the engine was told: a name, or a folder.
        weights_fingerprint: see :func:`fingerprint`.
        layout: whatever decides how bytes lie in a page (device, backend, instruction set, shape, order of
            dimensions, layers of this rank), by name; values are JSON's.
        page_size: tokens in one page (vLLM's block).
        chunk_tokens: the configuration's when it is not given.
        tp, pp: rank and size. Where all ranks hold the same bytes (MLA), tp is (0, 1) for all of them.

    Raises:
        ConfigurationError: a field is out of range.
    """
    return Namespace(
        model_id=config.namespace_model_id or model_name(model),
        chunk_tokens=config.chunk_tokens if chunk_tokens is None else chunk_tokens,
        weights_fingerprint=config.namespace_weights_fingerprint or weights_fingerprint,
        kv_dtype=kv_dtype,
        layout=f"{engine} {json.dumps(layout, sort_keys=True, separators=(',', ':'))}",
        page_size=page_size,
        tp_rank=tp[0],
        tp_size=tp[1],
        pp_rank=pp[0],
        pp_size=pp[1],
        tenant_salt=config.namespace_tenant_salt,
    )


def chunk_digests(root: hashlib._Hash, names: Iterable[str]) -> list[bytes]:
    """Chunk keys of what an engine names by itself: the hash of the namespace's root (SHA-256) and the name."""
    digests = []
    for name in names:
        digest = root.copy()
        digest.update(name.encode())
        digests.append(digest.digest())
    return digests


def model_name(model: str) -> str:
    """The name that a model has in keys: of a path its last part, because each host may mount it elsewhere."""
    return Path(model).resolve().name if os.path.exists(model) else model


def fingerprint(model: str, revision: str = "") -> str:
    """16 hex digits that say which weights (or which adapter) lie at ``model``: a folder, a file, or a name in the
    hub's cache.

    Hashed are the configuration and, of each weight file, its name, size, beginning (with all names, types and shapes)
    and :data:`_SAMPLES` runs of bytes spread over it: a few hundred KiB are read of a model of any size. Two trainings
    that agree in all of these would be taken for one; a setting overrides this. Without a weight file that can be
    found, the name, the revision and the configuration must do.
    """
    digest = hashlib.sha256(b"polarkv-weights-v1")
    folder = _folder(model, revision)
    files = _weights(model, folder)
    if not files:
        _feed(digest, b"name", model.encode(), revision.encode())
    for name in _CONFIGURATION:
        if folder and (folder / name).is_file():
            _feed(digest, name.encode(), _configuration(folder / name))
    for path in files:
        _feed(digest, path.name.encode(), str(path.stat().st_size).encode(), *_samples(path))
    return digest.hexdigest()[:16]


class Adapters:
    """Which weights the adapters of a running engine have. The engine reads an adapter's files when it loads it.

    An adapter whose files have changed since it was first seen may have either weights: nobody but the engine knows
    when it read them. So it has no fingerprint any more; under another number it is another adapter.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[int, tuple[str, object]] = OrderedDict()

    def fingerprint(self, number: int, path: str) -> str | None:
        """The fingerprint of the engine's adapter ``number``, which lies at ``path``; None: not known for certain."""
        folder = _folder(path, "")
        files = _weights(path, folder)
        if not files:
            return None
        if folder is not None:
            files += [file for name in _CONFIGURATION if (file := folder / name).is_file()]
        stamp = [(str(file), *_stamp(file.stat())) for file in files]
        first, known = self._seen.get(number, ("", None))
        if known == stamp:
            return first
        found = fingerprint(path)
        if first and found != first:
            if complaints.due("adapter"):
                log.warning(
                    "the files of adapter %d have changed since it was loaded, its KV is not cached: %s", number, path
                )
            return None
        self._seen[number] = found, stamp
        if len(self._seen) > _ADAPTERS:
            self._seen.popitem(last=False)
        return found


def _stamp(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _weights(model: str, folder: Path | None) -> list[Path]:
    if folder is None:
        return [Path(model)] if os.path.isfile(model) else []
    return sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)})


def _feed(digest: hashlib._Hash, *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _folder(model: str, revision: str) -> Path | None:
    if os.path.isdir(model):
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        for name in _CONFIGURATION:
            found = try_to_load_from_cache(model, name, revision=revision or None)
            if isinstance(found, str):
                return Path(found).parent
    except ValueError:  # a name that the hub could not have
        pass
    return None


def _configuration(path: Path) -> bytes:
    raw = path.read_bytes()
    try:
        content = json.loads(raw)
    except ValueError:
        return raw
    if not isinstance(content, dict):
        return raw
    kept = {name: value for name, value in content.items() if name not in _NOT_OF_THE_MODEL}
    return json.dumps(kept, sort_keys=True).encode()


def _samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        yield file.read(_HEAD_BYTES)
        for place in range(_SAMPLES):
            file.seek(size * place // _SAMPLES)
            yield file.read(_SAMPLE_BYTES)
        file.seek(max(size - _SAMPLE_BYTES, 0))
        yield file.read(_SAMPLE_BYTES)
