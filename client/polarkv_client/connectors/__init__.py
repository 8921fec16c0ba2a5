"""Connectors: how inference engines use the client. Each engine has a module; the rest is what they share.

``settings`` is the one configuration, ``identity`` says which engines' chunks fit each other, ``guard`` keeps trouble
from the engine. None of those imports an engine or torch. Design, contract and tests: docs/design/connectors.md.
"""
