"""Quarantine of modes whose numerics drifted, and the layout that remains without them. Pure.

Ranks probe their modes at start and, if configured, after each switch, and repeat the newest
results in every report. A drift quarantines the mode for those ranks until an operator reinstates
it or one of the ranks restarts. The group falls back to tp, if that is another mode, or to dp. A
rank whose dp is quarantined leaves all layouts: its own weights are wrong. If there is no other
rank, it keeps serving: a doubtful answer beats none, and the alert has fired.
"""

from collections.abc import Collection, Iterable

from comm_pool.layout import Group, Layout, Mode, Rank, step_name
from coordinator.protocol.messages.rank import Probed

Place = tuple[tuple[Rank, ...], str]
"""Ranks, and the name of the mode in which they compute steps."""


class ModeQuarantine:
    """The results of probes, and the quarantined modes."""

    __slots__ = ("_newest", "_unreported", "barred")

    def __init__(self) -> None:
        self._newest: dict[Place, Probed] = {}
        self._unreported: list[Probed] = []
        self.barred: dict[Place, Probed] = {}
        """The quarantined modes, each with the probe that showed the drift."""

    def take(self, probed: Iterable[Probed]) -> None:
        """Store a rank's probes; repeated ones change nothing."""
        for each in probed:
            place = (each.ranks, each.mode)
            if self._newest.get(place) == each:
                continue
            self._newest[place] = each
            if each.has_drifted and place not in self.barred:
                self.barred[place] = each
                self._unreported.append(each)

    def renewed(self, rank: Rank) -> None:
        """A new process takes the rank's place: results of its groups no longer apply."""
        self.barred = {place: why for place, why in self.barred.items() if rank not in place[0]}
        # Living leaders still report the groups that they had with the old process.
        led = [place for place in self._newest if place[0][0] == rank]
        for place in led:
            del self._newest[place]

    def put_back(self, mode: str) -> bool:
        """Reinstate a mode wherever it is quarantined; False if it is not."""
        places = [place for place in self.barred if place[1] == mode]
        for place in places:
            del self.barred[place]
        return bool(places)

    def take_unreported(self) -> list[Probed]:
        """Return the modes quarantined since the last call."""
        unreported, self._unreported = self._unreported, []
        return unreported

    def newest(self) -> list[Probed]:
        """Return the newest probe of each mode of each group, by ranks."""
        return [self._newest[place] for place in sorted(self._newest)]

    def modes_out(self) -> frozenset[str]:
        """Return the modes that are quarantined anywhere."""
        return frozenset(mode for _, mode in self.barred)

    def why_not(self, group: Group) -> Probed | None:
        """Return the probe that quarantines a group, if there is one."""
        names = (step_name(mode, group.width) for mode in group.step_modes)
        places = ((group.ranks, name) for name in names)
        return next((self.barred[place] for place in places if place in self.barred), None)

    def is_wrong(self, rank: Rank) -> bool:
        """Return whether the rank computes wrongly alone."""
        return self.why_not(Group((rank,), Mode.DP)) is not None

    def remaining(self, layout: Layout, narrowest: int = 1) -> Layout:
        """Return the layout without quarantined modes; unchanged if it has none.

        Where groups narrower than `narrowest` cannot serve, a group keeps its mode if its tp is
        quarantined too.
        """
        groups = [each for group in layout.groups for each in self._instead_of(group, narrowest)]
        serving = [each for each in groups if each.width > 1 or not self.is_wrong(each.leader)]
        return Layout(tuple(serving or groups[:1]))

    def _instead_of(self, group: Group, narrowest: int) -> Collection[Group]:
        if group.width == 1 or self.why_not(group) is None:
            return (group,)
        in_tp = Group(group.ranks, Mode.TP)
        if self.why_not(in_tp) is None:
            return (in_tp,)
        if narrowest > 1:
            return (group,)
        return [Group((rank,), Mode.DP) for rank in group.ranks]
