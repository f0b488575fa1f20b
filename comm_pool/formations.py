"""The formation that a rank's collectives belong to, and the aborted ones. Pure."""

ABORTED_MAX = 16
"""Number of aborted formations that are remembered, the newest."""


class PeerLostError(RuntimeError):
    """The formation has lost a member: its in-flight step is void, and none follows."""

    def __init__(self, formation: int) -> None:
        super().__init__(
            f"formation {formation} has lost a member: discard the results of its step."
        )
        self.formation = formation


class Formations:
    """Formations, each named by the epoch in which it was formed; 0 is the start-up.

    The main loop calls `enter`; any thread may call `abort`.
    """

    def __init__(self) -> None:
        self.formation = 0
        self._aborted: frozenset[int] = frozenset()

    def enter(self, formation: int) -> None:
        """Make collectives belong to this formation from now on."""
        self.formation = formation

    def abort(self, formation: int) -> None:
        """Abort the formation's collectives on this rank, now and later."""
        if formation not in self._aborted:
            # Formations are joined in order, so only the last few are ever asked for.
            self._aborted = frozenset(sorted((*self._aborted, formation))[-ABORTED_MAX:])

    def is_aborted(self, formation: int) -> bool:
        """Return whether this rank has aborted the formation."""
        return formation in self._aborted
