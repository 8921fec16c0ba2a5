"""The shared contract and the client library: keys, layout, protocol, transports and the `polarkv` command."""

from polarkv_client.bundled import attach as _attach

_attach(__file__)
