"""`polarkv put` and `polarkv get`: files in the cache, for people who want to try it.

A file is cut into chunks whose keys come from the namespace ``files/<name>`` with the file's SHA-256 as fingerprint, so
that another content has other keys. One more chunk, of fixed size, says what is stored under the name.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from polarkv_client.cli.common import Session, parse_chunk, progress, session_options, table
from polarkv_client.errors import ConfigurationError, PolarKVError
from polarkv_client.keys import Namespace, chunk_keys
from polarkv_client.layout import ALIGNMENT_BYTES, HEADER_BYTES
from polarkv_client.results import ChunkStore, Stored
from polarkv_client.settings_cli import show_size

if TYPE_CHECKING:
    from rich.console import Console

    from polarkv_client.sync import SyncClient

NOTE_BYTES = ALIGNMENT_BYTES - HEADER_BYTES  # with its header it fills one slot of the smallest size class
_BATCH_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_PASSING_S, _PAUSE_S = 5.0, 0.02  # how long a key may be on its way in or out by another hand
Advance = Callable[[int], None]


class NotCached(PolarKVError):
    """The file, or a part of it, is not in the cache (any more)."""


@dataclass(frozen=True)
class Note:
    """What is stored under a name."""

    size_bytes: int
    chunk_bytes: int
    sha256: str

    @property
    def lengths(self) -> list[int]:
        """Payload lengths of the chunks."""
        whole, rest = divmod(self.size_bytes, self.chunk_bytes)
        return [self.chunk_bytes] * whole + ([rest] if rest else [])

    def keys(self, name: str) -> list[bytes]:
        """The chunks' keys."""
        namespace = Namespace(model_id=f"files/{name}", chunk_tokens=1, weights_fingerprint=self.sha256, layout="file")
        return chunk_keys(namespace, range(len(self.lengths)))

    def pack(self) -> bytes:
        """The note's chunk: JSON, filled up with spaces."""
        return json.dumps(asdict(self)).encode().ljust(NOTE_BYTES)


@dataclass
class Report:
    """What became of a file. ``outcomes`` counts chunks by what the cache said; ``seconds`` are those of its calls."""

    name: str
    size_bytes: int
    chunks: int
    chunk_bytes: int
    sha256: str
    outcome: str = ""
    seconds: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        """Bytes moved in a second, 10^9."""
        return self.size_bytes / self.seconds / 1e9 if self.seconds else 0.0


def note_key(name: str) -> bytes:
    """The key of what is said about a name."""
    return chunk_keys(Namespace(model_id=f"files/{name}", chunk_tokens=1, layout="file-note"), [0])[0]


def load_note(client: SyncClient, name: str) -> Note | None:
    """What is stored under a name; None when nothing is."""
    raw = bytearray(NOTE_BYTES)
    found = client.load([note_key(name)], [raw]).chunks[0]
    if not found.hit:
        return None
    try:
        return Note(**json.loads(raw))
    except (ValueError, TypeError) as error:
        raise PolarKVError(f"what is stored under {name!r} is no file that 'polarkv put' wrote: {error}") from error


def batches(note: Note, name: str) -> Iterator[tuple[list[bytes], list[int]]]:
    """Keys and lengths of runs of chunks that together fit a bounded buffer."""
    keys, lengths = note.keys(name), note.lengths
    step = max(1, _BATCH_BYTES // note.chunk_bytes)
    for start in range(0, len(keys), step):
        yield keys[start : start + step], lengths[start : start + step]


def digest_of(path: Path, advance: Advance) -> tuple[str, int]:
    """SHA-256 and size of a file."""
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
            size_bytes += len(part)
            advance(len(part))
    return digest.hexdigest(), size_bytes


def store_file(client: SyncClient, path: Path, name: str, note: Note, advance: Advance) -> Report:
    """Store a file's chunks, then its note.

    Raises:
        PolarKVError: it changed meanwhile, a chunk was not taken, or another file has the name.
    """
    report = Report(name, note.size_bytes, len(note.lengths), note.chunk_bytes, note.sha256)
    earlier = load_note(client, name)
    if earlier is not None and earlier.sha256 != note.sha256:
        raise PolarKVError(f"another file is stored as {name!r}: pass --replace, or another --name")
    outcomes: Counter[str] = Counter()
    digest = hashlib.sha256()
    seconds = 0.0
    buffers = [bytearray(length) for length in next(batches(note, name), ([], []))[1]]
    with path.open("rb") as file:
        for keys, lengths in batches(note, name):
            views = [memoryview(buffer)[:length] for buffer, length in zip(buffers, lengths, strict=False)]
            for view in views:
                if file.readinto(view) != len(view):
                    raise PolarKVError(f"{path} became shorter while it was read: try again")
                digest.update(view)
            begun = time.perf_counter()
            chunks = _store(client, keys, views)
            seconds += time.perf_counter() - begun
            for chunk in chunks:
                outcomes[chunk.outcome.value] += 1
                if chunk.outcome not in {Stored.STORED, Stored.EXISTS}:
                    why = chunk.detail or chunk.reason or "see 'polarkv status'"
                    raise PolarKVError(f"a chunk of {name!r} was not stored: {chunk.outcome.value} ({why})")
            advance(sum(lengths))
    if digest.hexdigest() != note.sha256:
        raise PolarKVError(f"{path} changed while it was read: try again")
    said = _store(client, [note_key(name)], [note.pack()])[0]
    if said.outcome not in {Stored.STORED, Stored.EXISTS}:
        raise PolarKVError(f"the note of {name!r} was not stored: {said.outcome.value} ({said.detail or said.reason})")
    report.seconds = seconds
    report.outcomes = dict(outcomes)
    report.outcome = "exists" if outcomes.keys() <= {Stored.EXISTS.value} and earlier else "stored"
    return report


def _store(client: SyncClient, keys: list[bytes], buffers: Sequence[object]) -> list[ChunkStore]:
    """Store, and wait a while for keys of which a former file is still being deleted, or that another is storing."""
    chunks = list(client.store(keys, buffers).chunks)
    deadline = time.monotonic() + _PASSING_S
    while time.monotonic() < deadline:
        waiting = [place for place, chunk in enumerate(chunks) if chunk.outcome is Stored.IN_PROGRESS]
        if not waiting:
            break
        time.sleep(_PAUSE_S)
        again = client.store([keys[place] for place in waiting], [buffers[place] for place in waiting]).chunks
        for place, chunk in zip(waiting, again, strict=True):
            chunks[place] = chunk
    return chunks


def load_file(client: SyncClient, name: str, target: BinaryIO, note: Note, advance: Advance) -> Report:
    """Load a file's chunks into ``target`` and check that they are those that were stored.

    Raises:
        NotCached: a chunk is missing. PolarKVError: the bytes are not those that were stored.
    """
    report = Report(name, note.size_bytes, len(note.lengths), note.chunk_bytes, note.sha256)
    outcomes: Counter[str] = Counter()
    digest = hashlib.sha256()
    seconds = 0.0
    buffers = [bytearray(length) for length in next(batches(note, name), ([], []))[1]]
    for keys, lengths in batches(note, name):
        views = [memoryview(buffer)[:length] for buffer, length in zip(buffers, lengths, strict=False)]
        begun = time.perf_counter()
        chunks = client.load(keys, views).chunks
        seconds += time.perf_counter() - begun
        for chunk in chunks:
            outcomes[chunk.tier.name.lower() if chunk.hit else f"miss: {chunk.reason.value}"] += 1
        missing = sum(not chunk.hit for chunk in chunks)
        if missing:
            found = f"{missing} of {len(keys)} chunks are not there ({_counts(outcomes)})"
            raise NotCached(f"{name!r}: {found}: put it again")
        for view in views:
            digest.update(view)
            target.write(view)
        advance(sum(lengths))
    if digest.hexdigest() != note.sha256:
        raise PolarKVError(f"{name!r}: the bytes are not those that were stored; nothing was written")
    report.seconds, report.outcomes, report.outcome = seconds, dict(outcomes), "loaded"
    return report


def _counts(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))


def _show(session: Session, report: Report, verb: str) -> None:
    data: dict[str, Any] = {**asdict(report), "gb_per_s": round(report.gb_per_s, 3)}

    def render(out: Console) -> None:
        made = table("file", "size", "chunks", "outcome", "s", "GB/s", right=("size", "chunks", "s", "GB/s"))
        what = _counts(Counter(report.outcomes)) or report.outcome
        size = show_size(report.size_bytes)
        made.add_row(report.name, size, str(report.chunks), what, f"{report.seconds:.3f}", f"{report.gb_per_s:.2f}")
        out.print(f"{verb} [bold]{report.name}[/]")
        out.print(made)

    session.show(data, render)


@click.command(short_help="Store a file.")
@click.argument("path", type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path))
@click.option("--name", help="Name to store it under. Default: the file's own.")
@click.option("--chunk", default="4MiB", show_default=True, metavar="SIZE", help="Payload of one chunk.")
@click.option("--replace", is_flag=True, help="Replace another file of that name (needs the admin token).")
@session_options
def put(session: Session, path: Path, name: str | None, chunk: str, replace: bool) -> None:
    """Cut the file PATH into chunks and store them. It can be evicted at any time: the cache is no file system."""
    name = name or path.name
    chunk_bytes = parse_chunk(chunk)
    size_bytes = path.stat().st_size
    with session.patient_client() as client, progress(f"put {name}", 2 * size_bytes, quiet=session.as_json) as advance:
        sha256, size_bytes = digest_of(path, advance)
        note = Note(size_bytes, chunk_bytes, sha256)
        if replace and (earlier := load_note(client, name)) is not None and earlier != note:
            with session.admin() as admin:
                admin.evict([note_key(name), *earlier.keys(name)], purge=True)
        report = store_file(client, path, name, note, advance)
    _show(session, report, "stored" if report.outcome == "stored" else "already there:")


@click.command(short_help="Load a file that was put.")
@click.argument("name")
@click.option("-o", "--output", help="Where to write it, '-' for standard output. Default: NAME in this folder.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@session_options
def get(session: Session, name: str, output: str | None, force: bool) -> None:
    """Load the file stored as NAME, check its SHA-256, and write it."""
    to_stdout = output == "-"
    path = Path(output or Path(name).name)
    if not to_stdout and path.exists() and not force:
        raise ConfigurationError("--output", str(path), "the file exists: pass --force, or another --output")
    with session.patient_client() as client:
        note = load_note(client, name)
        if note is None:
            raise NotCached(f"{name!r} is not in the cache: it was never put, or it was evicted")
        with progress(f"get {name}", note.size_bytes, quiet=session.as_json) as advance:
            if to_stdout:
                load_file(client, name, sys.stdout.buffer, note, advance)
                return
            fresh = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                with fresh.open("wb") as target:
                    report = load_file(client, name, target, note, advance)
                fresh.rename(path)
            except OSError as error:
                fix = f"{error.strerror}: name a writable place"
                raise ConfigurationError("--output", str(path), fix) from error
            finally:
                fresh.unlink(missing_ok=True)
    _show(session, report, f"wrote {path} from")
