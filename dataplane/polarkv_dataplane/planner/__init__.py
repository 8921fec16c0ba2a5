"""The planner: what a cluster must have, what it costs, and what a trace would see of it.

``prices`` and ``shapes`` hold what is known of clouds and models; ``search`` finds the cheapest fleet; ``explain`` says
why; ``manifest`` writes it as a PolarKVCluster. Design, contract and tests: docs/design/planner.md.
"""
