"""Render docs/reference/configuration.md from the models that declare the settings."""

from __future__ import annotations

from polarkv_client.cli.common import CLIENT
from polarkv_dataplane.cli.servers import DISK, MANAGER, SLAB
from polarkv_dataplane.cli.up import UP
from polarkv_dataplane.raid.settings import RAID
from polarkv_operator.cli import OPERATOR
from polarkv_operator.webhooks.cli import WEBHOOK

OUTPUT = "docs/reference/configuration.md"
_HEAD = """\
# Configuration

Generated from the code by `make docs`; do not edit.

A setting's value comes from the first of these that has one: the flag, the environment, the file named by `--config`,
the default. The file is TOML (or JSON, by its suffix) with a section for each process; one file can serve them all. A
name that does not exist is an error, with the nearest one that does. In the environment a list is separated by commas.

Byte sizes are numbers of bytes or text such as `512MiB`, `4GiB`, `1.5GB`; their flags have no `-bytes` at the end. What
ends in `_ms` is in milliseconds. Secrets have no flag, because every user of a machine can see the flags of its
processes.

```toml
[up]
nodes = 2
memory_bytes = "4GiB"

[manager]
read_lease_ms = 5000
```
"""
_SECTIONS = (
    (UP, "The embedded cluster", "`polarkv up`. Its file reaches the servers too, which read their own sections."),
    (MANAGER, "Manager", "`polarkv manager`."),
    (SLAB, "Slab server", "`polarkv slab`."),
    (DISK, "Disk server", "`polarkv disk`."),
    (RAID, "Array", "`python -m polarkv_dataplane.raid`, the container `raid` of a cache node under `RAID0`."),
    (WEBHOOK, "Webhook", "`polarkv webhook`; the chart sets these."),
    (OPERATOR, "Operator", "`polarkv operator`."),
    (
        CLIENT,
        "Client",
        "Arguments of `SyncClient.connect` and `Client.connect`, by their names. Below the file stands the connection "
        "file that `polarkv up` writes. Of the flags, commands have only those that their `--help` names.",
    ),
)


def render() -> str:
    """The whole text."""
    parts = [_HEAD]
    for section, title, text in _SECTIONS:
        parts.append(f"## {title}: `[{section.name}]`\n\n{text}\n\n{section.reference()}")
    return "\n".join(parts)
