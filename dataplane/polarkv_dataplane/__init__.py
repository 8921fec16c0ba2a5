"""The data plane: manager, slab server, disk server and the embedded cluster."""
