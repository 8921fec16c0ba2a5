"""`polarkv ls`, `polarkv pin`, `polarkv evict`: what is in the cache, and who decides how long."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from polarkv_client.cli.admin_api import AdminClient, Done
from polarkv_client.cli.common import Session, session_options, table
from polarkv_client.cli.files import load_note, note_key
from polarkv_client.cli.main import ExitCode
from polarkv_client.errors import ConfigurationError, PolarKVError
from polarkv_client.keys import KEY_BYTES
from polarkv_client.settings_cli import show_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

_WHOLE_KEY = KEY_BYTES * 2
_MOST_MATCHES = 65_536
_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_duration(text: str, field: str) -> int:
    """Milliseconds of ``30s``, ``10m``, ``2h``, ``1d``, ``1500ms``.

    Raises:
        ConfigurationError: it is no duration.
    """
    match = re.fullmatch(r"\s*(\d+)\s*(ms|s|m|h|d)\s*", text)
    if not match:
        raise ConfigurationError(field, text, "write a duration such as 30s, 10m, 2h, 1d or 1500ms")
    return int(match[1]) * _UNITS_MS[match[2]]


def select_keys(session: Session, admin: AdminClient, keys: tuple[str, ...], files: tuple[str, ...]) -> list[bytes]:
    """The keys that are meant: whole ones, those that begin with a prefix, those of files.

    Raises:
        ConfigurationError: a key is no hex. PolarKVError: nothing begins with it, or a file is not there.
    """
    found: list[bytes] = []
    for text in keys:
        if not re.fullmatch(r"([0-9a-fA-F]{2})+", text) or len(text) > _WHOLE_KEY:
            raise ConfigurationError("KEY", text, f"write whole bytes in hex, at most {_WHOLE_KEY} digits")
        if len(text) == _WHOLE_KEY:
            found.append(bytes.fromhex(text))
            continue
        matches = [bytes.fromhex(entry["key"]) for entry in admin.entries(_MOST_MATCHES, text.lower())]
        if not matches:
            raise PolarKVError(f"no entry's key begins with {text}")
        found += matches
    if files:
        with session.client() as client:
            for name in files:
                note = load_note(client, name)
                if note is None:
                    raise PolarKVError(f"{name!r} is not in the cache")
                found += [*note.keys(name), note_key(name)]
    return found


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add KEY…, ``--file`` and ``--all``."""
    command = click.option("--all", "everything", is_flag=True, help="Every entry.")(command)
    command = click.option("--file", "files", multiple=True, metavar="NAME", help="The chunks of a file that was put.")(
        command
    )
    return click.argument("keys", nargs=-1, metavar="[KEY]...")(command)


def _selected(
    session: Session, admin: AdminClient, keys: tuple[str, ...], files: tuple[str, ...], everything: bool
) -> list[bytes] | None:
    if everything == bool(keys or files):
        raise click.UsageError("name keys (whole, or how they begin) or --file, or pass --all; not both")
    return None if everything else select_keys(session, admin, keys, files)


@click.command(short_help="List entries.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1), help="Most entries to list.")
@click.option("--prefix", default="", metavar="HEX", help="Only keys that begin so (whole bytes).")
@session_options
def ls(session: Session, limit: int, prefix: str) -> None:
    """List entries in the order of their keys. JSON is a list of objects with key, state, node, tenant and sizes."""
    if not re.fullmatch(r"([0-9a-fA-F]{2})*", prefix):
        raise ConfigurationError("--prefix", prefix, "write whole bytes in hex, such as a1f0")
    with session.admin() as admin:
        entries = list(admin.entries(limit, prefix.lower()))
        total = admin.stats()["entries"]
    session.show(entries, lambda out: _render(out, entries, total, prefix))


def _render(out: Console, entries: list[dict[str, Any]], total: int, prefix: str) -> None:
    made = table("key", "state", "node", "tenant", "size", "leases", "pinned", right=("size", "leases", "pinned"))
    for entry in entries:
        pinned = f"{entry['pinned_ms'] / 1000:.0f} s" if entry["pinned_ms"] else ""
        leases = str(entry["leases"] or "")
        size = show_size(entry["length_bytes"])
        made.add_row(entry["key"], entry["state"], entry["node"], entry["tenant"], size, leases, pinned)
    out.print(made)
    begin = f" that begin with {prefix}" if prefix else ""
    out.print(f"{len(entries)} of {total} entries{begin}")


@click.command(short_help="Keep entries from eviction for a while.")
@selection_options
@click.option("--ttl", default="1h", show_default=True, metavar="DURATION", help="For how long (30s, 10m, 2h, 1d).")
@click.option("--remove", is_flag=True, help="End pins instead.")
@session_options
def pin(
    session: Session, keys: tuple[str, ...], files: tuple[str, ...], everything: bool, ttl: str, remove: bool
) -> None:
    """Pin entries: they stay cached for a time. KEY is a whole key in hex, or how keys begin."""
    ttl_ms = 0 if remove else parse_duration(ttl, "--ttl")
    with session.admin() as admin:
        done = admin.pin(_selected(session, admin, keys, files, everything), ttl_ms)
    _finish(session, done, "unpinned" if remove else f"pinned for {ttl}")


@click.command(short_help="Drop memory copies, or whole entries.")
@selection_options
@click.option(
    "--tier", type=click.Choice(["memory", "all"]), default="memory", show_default=True,
    help="memory: memory copies that disk has too; all: the entries, memory and disk.",
)  # fmt: skip
@session_options
def evict(session: Session, keys: tuple[str, ...], files: tuple[str, ...], everything: bool, tier: str) -> None:
    """Evict entries now. KEY is a whole key in hex, or how keys begin."""
    with session.admin() as admin:
        done = admin.evict(_selected(session, admin, keys, files, everything), purge=tier == "all")
    _finish(session, done, "dropped" if tier == "all" else "evicted from memory")


def _finish(session: Session, done: Done, verb: str) -> None:
    why = "absent, held by a reader, busy, or only in memory as yet"

    def render(out: Console) -> None:
        rest = f"; {done.not_now} not now ({why})" if done.not_now else ""
        out.print(f"{done.done} entries {verb}{rest}")

    session.show({"done": done.done, "not_now": done.not_now}, render)
    # Something was named and nothing came of it. That there was nothing to evict at all is no failure.
    if done.not_now and not done.done:
        click.get_current_context().exit(int(ExitCode.FAILED))
