"""Discrete-event simulation of a trace on a cluster: the manager's own core, with virtual time and queues.

``scenario`` says what is simulated, ``clock`` and ``pipes`` are time and bandwidth, ``cluster`` runs the core and its
effects, ``transfers`` are loads and stores as clients make them, ``engines`` compute, ``run`` puts it together.
"""
