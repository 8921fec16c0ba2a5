"""The protocol itself, pure: events and ``now`` (ms) in, outcomes and effects out. No clock, no I/O, no thread.

Read in this order: ``table`` (what may happen to an entry), ``ledger`` (the one place where an entry changes),
``tiering`` (offload, load, evict, purge), ``membership`` (nodes come, drain and go), ``directory`` (what clients ask).
What is remembered lies beside it, in ``records``.
"""
