"""The shared contract and the client library: keys, layout, protocol, transports and the `polarkv` command."""
