"""Which formation a rank's collectives belong to, and which of them were aborted. Pure."""

KEPT = 16
"""Aborted formations that are remembered, the last ones."""


class PeerLostError(RuntimeError):
    """The formation has lost a member: nothing of the step under way counts, and none follows."""

    def __init__(self, formation: int) -> None:
        super().__init__(
            f"formation {formation} has lost a member: what it computed does not count."
        )
        self.formation = formation


class Formations:
    """Formations, named by the epoch in which they were formed; that of the start-up is 0.

    `enter` is the main loop's; `abort` may be called from another thread.
    """

    def __init__(self) -> None:
        self.formation = 0
        self._aborted: frozenset[int] = frozenset()

    def enter(self, formation: int) -> None:
        """Collectives belong to this formation from now on."""
        self.formation = formation

    def abort(self, formation: int) -> None:
        """Call this rank out of the formation's collectives, now and later."""
        if formation not in self._aborted:
            # Formations are joined in order, so the last few are all that is ever asked for.
            self._aborted = frozenset(sorted((*self._aborted, formation))[-KEPT:])

    def is_aborted(self, formation: int) -> bool:
        """Whether this rank was called out of it."""
        return formation in self._aborted
