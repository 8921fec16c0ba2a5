"""What the manager remembers, as plain data: entries, grants, nodes, slots. The rules are in ``core``."""
