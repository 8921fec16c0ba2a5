"""Injection: the admission webhook that gives inference pods the client library and the address of their cluster.

The decision is pure: :mod:`~polarkv_operator.webhooks.injection` turns a pod into a JSON patch, or into the reason why
there is none. Around it are the server, its certificates and its Events.
"""
