"""Render docs/reference/connectors.md from the model that declares the connectors' settings."""

from __future__ import annotations

from polarkv_client.config import ClientConfig
from polarkv_client.connectors.settings import ConnectorConfig
from polarkv_client.settings_cli import Section

OUTPUT = "docs/reference/connectors.md"
_HEAD = """\
# Settings of the connectors

Generated from the code by `make docs`; do not edit.

One configuration for vLLM, SGLang and LMCache. A setting's value comes from the first of these that has one:

1. the engine's flag, as JSON: `kv_connector_extra_config` of vLLM, `--hicache-storage-backend-extra-config` of SGLang,
   `extra_config` of LMCache;
2. the environment: the name in capitals after `POLARKV_`;
3. a connection file, which `connection` in the flag or `POLARKV_CONNECTION` names: JSON with the same names.
   `polarkv up` writes one; in Kubernetes, `connection.json` of the ConfigMap `CLUSTER-connection` is one;
4. the default.

A name that does not exist and a value that cannot be used are errors when the engine starts, with the name and the fix.
A cache that cannot be reached is none. Tokens belong in the environment or the file: flags can be seen by every user of
a machine.

"""


def render() -> str:
    """The whole text."""
    lines = ["| name | environment | default | what it is |", "|---|---|---|---|"]
    for setting in Section("connector", ConnectorConfig).settings():
        if setting.name not in ClientConfig.model_fields:
            what = f"{setting.info.description}" + (f" ({setting.limits})" if setting.limits else "")
            lines.append(f"| `{setting.name}` | `{setting.variable}` | {setting.shown_default} | {what} |")
    rest = ", ".join(f"`{name}`" for name in ClientConfig.model_fields)
    tail = f"\nBeside these, all [settings of the client](configuration.md#client-client): {rest}.\n"
    return _HEAD + "\n".join(lines) + "\n" + tail
