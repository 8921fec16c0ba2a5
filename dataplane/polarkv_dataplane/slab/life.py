"""The slab server's present registration: what grants are checked against."""

from __future__ import annotations

from polarkv_client.errors import Refused
from polarkv_client.protocol import grants
from polarkv_client.protocol.grants import Access, Grant
from polarkv_dataplane.runtime.clock import ManagerClock
from polarkv_dataplane.runtime.session import Life


class GrantEnded(Refused):
    """The grant's deadline passed, or its incarnation or epoch did, while bytes were moving."""


class Gate:
    """Lets through what the present incarnation and epoch allow; nothing before the first registration."""

    def __init__(self, grant_key: bytes) -> None:
        self._grant_key = grant_key
        # One value, replaced as a whole: a grant of one manager is never held against another one's clock.
        self._present: tuple[Life, ManagerClock] | None = None

    @property
    def life(self) -> Life:
        """The present registration.

        Raises:
            Refused: there has been none yet.
        """
        return self._now()[0]

    def _now(self) -> tuple[Life, ManagerClock]:
        present = self._present
        if present is None:
            raise Refused("this slab server has not registered at its manager yet: try again")
        return present

    def enter(self, life: Life, clock: ManagerClock) -> bool:
        """Take a new registration; return whether it ends an earlier incarnation. For one thread at a time."""
        before, self._present = self._present, (life, clock)
        return before is not None and before[0].incarnation != life.incarnation

    def admit(self, signed: bytes, access: Access | None) -> Grant:
        """Check a grant; with ``access`` None either kind will do.

        Raises:
            Unauthorized, Refused, ProtocolError: as ``grants.verify`` says.
        """
        life, clock = self._now()
        if access is None:
            claimed = grants.read(signed).access
            access = Access.WRITE if claimed == Access.WRITE else Access.READ
        grant = grants.verify(
            signed,
            self._grant_key,
            access=access,
            incarnation=life.incarnation,
            epoch=life.epoch,
            manager_now_ms=int(clock.now_ms()) + 1,
        )
        if grant.node != life.number:
            raise Refused(f"the grant is for cache node {grant.node}, this is {life.number}")
        return grant

    def still(self, grant: Grant) -> None:
        """Check again a grant that was admitted.

        Raises:
            GrantEnded: it does not hold any more.
        """
        life, clock = self._now()
        if grant.incarnation != life.incarnation or grant.epoch != life.epoch:
            raise GrantEnded("the slab server has registered anew: the grant has ended")
        if clock.now_ms() >= grant.deadline_ms:
            raise GrantEnded("the grant ended while its bytes were moving")
