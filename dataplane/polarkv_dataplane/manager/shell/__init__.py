"""The manager's shell: sockets, clock, metadata store and admin API around the pure core.

Read in this order: ``app`` (start and end), ``manager`` (events in, effects out), ``peer`` (frames), ``clients`` and
``nodes`` (what they may ask), ``waiting`` (calls that wait), ``metadata`` (written behind), ``admin`` (HTTP).
"""
