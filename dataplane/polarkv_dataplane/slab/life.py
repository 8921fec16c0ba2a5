"""The slab server's present registration: what grants are checked against."""

from __future__ import annotations

import threading

from polarkv_client.errors import Refused
from polarkv_client.protocol import grants
from polarkv_client.protocol.grants import Access, Grant
from polarkv_dataplane.runtime.clock import ManagerClock
from polarkv_dataplane.runtime.session import Life


class GrantEnded(Refused):
    """The grant's deadline passed, or its incarnation or epoch did, while bytes were moving."""


class Gate:
    """Lets through what the present incarnation and epoch allow; nothing before the first registration."""

    def __init__(self, grant_key: bytes, clock: ManagerClock) -> None:
        self._grant_key = grant_key
        self._clock = clock
        self._lock = threading.Lock()
        self._life: Life | None = None

    @property
    def life(self) -> Life:
        """The present registration.

        Raises:
            Refused: there has been none yet.
        """
        life = self._life
        if life is None:
            raise Refused("this slab server has not registered at its manager yet: try again")
        return life

    def enter(self, life: Life) -> bool:
        """Take a new registration; return whether it ends an earlier incarnation."""
        with self._lock:
            before, self._life = self._life, life
        return before is not None and before.incarnation != life.incarnation

    def admit(self, signed: bytes, access: Access | None) -> Grant:
        """Check a grant; with ``access`` None either kind will do.

        Raises:
            Unauthorized, Refused, ProtocolError: as ``grants.verify`` says.
        """
        life = self.life
        if access is None:
            claimed = grants.read(signed).access
            access = Access.WRITE if claimed == Access.WRITE else Access.READ
        grant = grants.verify(
            signed,
            self._grant_key,
            access=access,
            incarnation=life.incarnation,
            epoch=life.epoch,
            manager_now_ms=int(self._clock.now_ms()) + 1,
        )
        if grant.node != life.number:
            raise Refused(f"the grant is for cache node {grant.node}, this is {life.number}")
        return grant

    def still(self, grant: Grant) -> None:
        """Check again a grant that was admitted.

        Raises:
            GrantEnded: it does not hold any more.
        """
        life = self._life
        if life is None or grant.incarnation != life.incarnation or grant.epoch != life.epoch:
            raise GrantEnded("the slab server has registered anew: the grant has ended")
        if self._clock.now_ms() >= grant.deadline_ms:
            raise GrantEnded("the grant ended while its bytes were moving")
