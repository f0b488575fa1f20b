"""The arrangements that the policy chooses from: layouts, and groups reserved for urgent tiers.

Layouts that differ only in where equal groups lie are one candidate: the one that changes the
fewest ranks. An arrangement may reserve groups for the most urgent tiers; the other groups take the
rest. Changing reservations needs no switch. `decide` calls this module.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from comm_pool.layout import (
    MAX_ENUMERATED_WORLD,
    Group,
    Layout,
    Mode,
    Rank,
    diff,
    format_layout,
    parse_layout,
    supported_layouts,
)
from comm_pool.mixed import Staged

Shape = tuple[str, ...]
"""Names of a layout's groups, widest first."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A layout, and the leaders of groups reserved for the `tiers` most urgent tiers."""

    layout: Layout
    reserved: tuple[Rank, ...] = ()
    tiers: int = 0

    @property
    def name(self) -> str:
        """The layout's notation, and the reserved groups."""
        text = format_layout(self.layout)
        if not self.reserved:
            return text
        leaders = ",".join(str(leader) for leader in self.reserved)
        tiers = "interactive" if self.tiers == 1 else "interactive and standard"
        return f"{text}, {leaders} for {tiers}"


class LayoutSpace:
    """All layouts of a cell, by shape."""

    __slots__ = ("_by_shape",)

    def __init__(
        self,
        world: int,
        modes: Mapping[int, Mode],
        *,
        absent: Collection[Rank] = (),
        alone: Collection[Rank] = (),
        pipelines: Collection[Staged] = (),
    ) -> None:
        """`modes`: supported width -> its mode; ranks in `alone` serve in dp only.

        Groups as wide as one of `pipelines` may also be such pipeline groups.
        """
        self._by_shape: dict[Shape, list[Layout]] = {}
        of_modes = _layouts(world, sorted(modes))
        for layout in dict.fromkeys(
            _in_modes(each, {**modes, **chosen})
            for chosen in _staged_choices(pipelines)
            for each in of_modes
        ):
            present = layout.without(absent)
            possible = Layout(present.without(alone).groups).plus(
                [rank for rank in alone if rank not in absent]
            )
            same = self._by_shape.setdefault(shape_of(possible), [])
            if possible not in same:
                same.append(possible)

    def layouts(self, current: Layout, urgent: Mapping[Rank, float] | None = None) -> list[Layout]:
        """Return one layout of each shape, the nearest to `current`.

        `urgent` says how many of the most urgent tier's tasks run on each rank. Among layouts that
        change as few ranks, the one that leaves most of these where they are is the nearest: tasks
        of a group that ends do not move into a reserved group that stays.
        """
        tasks = urgent or {}

        def distance(layout: Layout) -> tuple[int, float]:
            changed = diff(current, layout)
            return len(changed), round(sum(tasks.get(rank, 0.0) for rank in changed), 6)

        return [
            current if shape == shape_of(current) else min(same, key=distance)
            for shape, same in self._by_shape.items()
        ]


def shape_of(layout: Layout) -> Shape:
    """Return the names of a layout's groups, wherever they lie."""
    return tuple(group.name for group in sorted(layout.groups, key=lambda each: -each.width))


def arrangements(
    layout: Layout, tiers: Iterable[int], urgent: Mapping[Rank, float] | None = None
) -> list[Arrangement]:
    """Return a layout without reservations, and with some if several tiers have tasks.

    `urgent` says how many of the most urgent tier's tasks run on each rank. Among groups of one
    width, the one that has most of them is reserved first, as they stay where they run.
    """
    found = [Arrangement(layout)]
    present = sorted(tiers)
    cuts = [cut for cut in (1, 2) if cut - 1 in present and present[-1] >= cut]
    tasks = urgent or {}

    def order(group: Group) -> tuple[int, float, Rank]:
        running = sum(tasks.get(rank, 0.0) for rank in group.ranks)
        return -group.width, -round(running, 6), group.leader

    groups = sorted(layout.groups, key=order)
    for count in _reservations([group.width for group in groups]):
        leaders = tuple(sorted(group.leader for group in groups[:count]))
        found += [Arrangement(layout, leaders, cut) for cut in cuts]
    return found


def _reservations(widths: list[int]) -> list[int]:
    """Return how many groups, widest first, may be reserved: one or half, or all wide ones."""
    widest = widths.count(widths[0]) if widths else 0
    if len(widths) < 2:
        return []
    return [widest] if widest < len(widths) else sorted({1, widest // 2})


def _layouts(world: int, widths: list[int]) -> list[Layout]:
    if world <= MAX_ENUMERATED_WORLD:
        return list(supported_layouts(world, widths, (Mode.DP, Mode.TP)))
    # Of a large cell only layouts of one width, and those with one wider group.
    found = []
    for width in widths:
        tail = [f"tp{width}"] * (world // width) if width > 1 else [f"dp{world}"]
        found.append(parse_layout("+".join(tail), world, widths))
    for width in widths:
        if 1 < width < world:
            found.append(parse_layout(f"tp{width}+dp{world - width}", world, widths))
    return found


def _staged_choices(pipelines: Collection[Staged]) -> list[dict[int, Staged]]:
    """Return which pipeline groups a layout may have, by width: none, or all with stages alike."""
    parts = sorted({each.tp for each in pipelines})
    return [{}, *({each.width: each for each in pipelines if each.tp == tp} for tp in parts)]


def _in_modes(layout: Layout, modes: Mapping[int, Mode | Staged]) -> Layout:
    return Layout(tuple(_in_mode(group, modes) for group in layout.groups))


def _in_mode(group: Group, modes: Mapping[int, Mode | Staged]) -> Group:
    if group.width == 1:
        return group
    mode = modes[group.width]
    if isinstance(mode, Staged):
        return Group(group.ranks, Mode.PP, mode.tp)
    return Group(group.ranks, mode)
