"""Layouts: partitions of a cell's ranks into groups with modes, and their notation.

Invariant: a `Group` is aligned, contiguous and a power of two wide, `dp` exactly when it is one
rank wide, and the groups of a `Layout` never overlap. So every group that a layout can name, in
widths that `comm_pool.plan` accepts, has a communicator there (groups: Flying Serving, section
4.3). Called by the coordinator (policy, switch protocol, admin API) and by every rank.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise
from typing import NewType

from comm_pool.mixed import Mixed, MixedError, Staged, StagedError

Rank = NewType("Rank", int)
"""A device and the one process that owns it, numbered 0..world-1 inside a cell."""

MAX_NOTATION_CHARS = 1024
"""Maximum length of the notation that is read; it comes from the network."""

MAX_ENUMERATED_WORLD = 16
"""Maximum ranks for `supported_layouts`.

With two wide modes, 8 ranks give 123 layouts and 16 give 15,131; the count squares with every
doubling.
"""

_ABSENT = "off"
_TOKEN = re.compile(r"([a-z]+)(0|[1-9][0-9]*)")
_TOKEN_WITH_PARTS = re.compile(r"(sp|shift|pp)([1-9][0-9]{0,3})tp([1-9][0-9]{0,3})")


class LayoutError(ValueError):
    """An impossible layout; the message is one sentence fit for an operator."""


class AbsentRankError(KeyError):
    """The rank that was looked up is not in the layout."""

    def __str__(self) -> str:
        """Return the sentence itself; KeyError would return its repr."""
        return str(self.args[0])


class Mode(StrEnum):
    """How a group computes; members are enumerated in this order.

    A `shift` group computes each step in tp or in sp, whichever is faster for its number of tokens
    (Shift Parallelism, algorithm 3); `tp` and `sp` pin a group to one of them. A step itself is
    never `shift`. In a mixed group, its `Mixed` takes the place of sp. In a `pp` group each member
    computes a range of the layers, and steps have its `Staged` in place of the mode.
    """

    DP = "dp"
    TP = "tp"
    SP = "sp"
    SHIFT = "shift"
    PP = "pp"


StepMode = Mode | Mixed | Staged
"""How one step is computed: dp, tp, sp, tokens and weights divided, or layers divided."""


@dataclass(frozen=True, slots=True)
class Group:
    """Aligned, contiguous ranks that run one model together.

    `ranks` ascend; their number (the width) is a power of two that divides the first of them. Mode
    is `dp` if and only if the width is 1. `tp` is the number of parts into which a mixed group of
    mode sp or shift, or each stage of a pp group, splits the weights; it is 1 in all other groups.
    Anything else raises `LayoutError`.
    """

    ranks: tuple[Rank, ...]
    mode: Mode
    tp: int = 1

    def __post_init__(self) -> None:
        """Refuse invalid ranks, modes and parts."""
        width = len(self.ranks)
        if width == 0:
            raise LayoutError("a group needs at least one rank.")
        first = self.ranks[0]
        if first < 0 or self.ranks != tuple(range(first, first + width)):
            raise LayoutError(f"ranks {self.ranks} are not contiguous, ascending and from 0 up.")
        if width & (width - 1):
            raise LayoutError(f"ranks {self.ranks} are {width} wide, which is not a power of two.")
        if first % width:
            raise LayoutError(
                f"ranks {self.ranks} are not aligned: a group {width} wide starts at a "
                f"multiple of {width}."
            )
        if (self.mode is Mode.DP) != (width == 1):
            raise LayoutError(
                f"mode {self.mode} does not go with width {width}: a group one rank wide is dp, "
                f"a wider one is tp, sp, shift or pp."
            )
        if self.tp != 1:
            _check_parts(self.mode, width, self.tp)

    @property
    def width(self) -> int:
        """Number of ranks, k."""
        return len(self.ranks)

    @property
    def leader(self) -> Rank:
        """The lowest rank, which schedules for the group."""
        return self.ranks[0]

    @property
    def name(self) -> str:
        """Mode and width, such as `tp2`, `dp1`, `sp2tp2` or `pp4`, without the ranks."""
        if self.tp == 1:
            return f"{self.mode}{self.width}"
        return f"{self.mode}{self.width // self.tp}tp{self.tp}"

    @property
    def mixed(self) -> Mixed | None:
        """The division of tokens and weights, if the group is mixed."""
        is_mixed = self.tp > 1 and self.mode is not Mode.PP
        return Mixed(self.width // self.tp, self.tp) if is_mixed else None

    @property
    def stages(self) -> int:
        """Number of pipeline stages; 1 if this is no pipeline group."""
        return self.width // self.tp if self.mode is Mode.PP else 1

    @property
    def lease_key(self) -> tuple[Rank, ...]:
        """The key of its lease; see the function."""
        return lease_key(self.ranks, self.stages)

    @property
    def step_modes(self) -> tuple[StepMode, ...]:
        """The modes in which its steps may be computed."""
        match self.mode:
            case Mode.DP | Mode.TP:
                return (self.mode,)
            case Mode.SP:
                return (self.mixed or Mode.SP,)
            case Mode.SHIFT:
                return (Mode.TP, self.mixed or Mode.SP)
            case Mode.PP:
                return (Staged(self.stages, self.tp),)


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups that do not overlap, always sorted by leader.

    A layout need not hold every rank of its cell: a lost rank is simply missing. Equal layouts
    compare and hash equal. Overlapping groups raise `LayoutError`.
    """

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        """Sort the groups and refuse overlaps."""
        ordered = tuple(sorted(self.groups, key=lambda group: group.leader))
        object.__setattr__(self, "groups", ordered)
        for first, second in pairwise(ordered):
            if second.leader <= first.ranks[-1]:
                raise LayoutError(f"groups {first.ranks} and {second.ranks} overlap.")

    def __str__(self) -> str:
        """Return the notation; see `format_layout` for absent ranks after the last group."""
        return format_layout(self)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks of all groups, ascending."""
        return tuple(rank for group in self.groups for rank in group.ranks)

    @property
    def widths(self) -> frozenset[int]:
        """The widths in use."""
        return frozenset(group.width for group in self.groups)

    def group_of(self, rank: Rank) -> Group:
        """Return the group that holds `rank`; raise `AbsentRankError` if none does."""
        for group in self.groups:
            if rank in group.ranks:
                return group
        raise AbsentRankError(f"rank {rank} is in no group of layout '{self}'.")

    def without(self, ranks: Collection[Rank]) -> "Layout":
        """Return the layout after losing `ranks`; absent ones are ignored.

        A group that loses a member cannot continue: its survivors serve alone, in dp.
        """
        lost = frozenset(ranks)
        groups: list[Group] = []
        for group in self.groups:
            if lost.isdisjoint(group.ranks):
                groups.append(group)
            else:
                groups += _alone(rank for rank in group.ranks if rank not in lost)
        return Layout(tuple(groups))

    def plus(self, ranks: Collection[Rank]) -> "Layout":
        """Return the layout with the missing ones of `ranks` added, each alone in dp."""
        missing = frozenset(ranks).difference(self.ranks)
        return Layout((*self.groups, *_alone(missing)))


def lease_key(ranks: tuple[Rank, ...], stages: int) -> tuple[Rank, ...]:
    """Return the members in the order of what they hold: their layers, then their heads.

    Without pipeline stages that is `ranks`, which ascend. It is the key of a group's lease: groups
    of the same ranks share their pages only if they divide KV alike.
    """
    tp = len(ranks) // stages
    return tuple(rank for first in range(len(ranks) - tp, -1, -tp) for rank in ranks[first:][:tp])


def group_of(key: tuple[Rank, ...]) -> Group:
    """Return a wide group whose lease has this key: a pipeline group, or one of mode tp."""
    tp = key.index(max(key)) + 1
    ranks = tuple(sorted(key))
    return Group(ranks, Mode.TP) if tp == len(key) else Group(ranks, Mode.PP, tp)


def step_name(mode: StepMode, width: int) -> str:
    """Return the name of a mode of a group's steps, such as `tp2`, `sp2tp2` or `pp4`."""
    return f"{mode}{width}" if isinstance(mode, Mode) else str(mode)


def parse_layout(text: str, world: int, widths: Collection[int]) -> Layout:
    """Read the notation of a layout of `world` ranks; width 1 is always supported.

    Tokens joined by `+` take the ranks in order: `dpN` is N ranks, each alone; `tpK`, `spK`,
    `shiftK` and `ppK` are one group of K ranks; `spMtpN` and `shiftMtpN` are one mixed group of M·N
    ranks, in which M exchange heads, so M is a supported width too; `ppMtpN` is one group of M
    pipeline stages, in each of which N ranks sum, so N is a supported width too; `offN` leaves N
    ranks out, because they are lost or must stay unused. So `tp2+dp2` is ranks 0-1 together, then 2
    and 3 alone, and `dp2+off1+dp1` is four ranks without rank 2. A caller that must not leave a
    rank out checks `Layout.ranks`. Any other text raises `LayoutError`: one sentence with the fault
    and what is supported. Costs O(world), whatever the text.
    """
    if world < 1:
        raise LayoutError(f"a cell has at least one rank, not {world}.")
    if not text:
        raise LayoutError(f"the layout is empty; write for example '{Mode.DP}{world}'.")
    if len(text) > MAX_NOTATION_CHARS:
        raise LayoutError(
            f"the layout is {len(text)} characters long; at most {MAX_NOTATION_CHARS} are read."
        )
    groups: list[Group] = []
    first = 0
    for token in text.split("+"):
        word, count, parts = _read_token(token, text, world, widths)
        if word not in (Mode.DP, _ABSENT):
            _check_wide(token, count, first, widths)
        if parts > 1:
            _check_inside(token, Mode(word), count, parts, widths)
        if first + count > world:
            raise LayoutError(_coverage(text, "more than", world))
        ranks = tuple(Rank(rank) for rank in range(first, first + count))
        if word == Mode.DP:
            groups += _alone(ranks)
        elif word != _ABSENT:
            groups.append(Group(ranks, Mode(word), parts))
        first += count
    if first < world:
        raise LayoutError(_coverage(text, f"only {first} of", world))
    return Layout(tuple(groups))


def format_layout(layout: Layout, world: int | None = None) -> str:
    """Return the canonical notation: neighbouring dp ranks merge, wide groups stay apart.

    Absent ranks are written as `offN`; those after the last group only if `world` is given:
    `parse_layout(format_layout(x, world), world, widths) == x` for every x that fits. A layout of
    no ranks is the empty text without `world`. Ranks beyond `world` raise `LayoutError`.
    """
    end = layout.ranks[-1] + 1 if layout.groups else 0
    if world is None:
        world = end
    if end > world:
        raise LayoutError(f"layout '{layout}' does not fit into {world} ranks.")
    tokens: list[str] = []
    for word, run in groupby(_spans(layout, world), key=lambda span: span[0]):
        spans = list(run)
        # Two neighbouring tp2 are not one tp4, but dp counts ranks and may be added up.
        if word == Mode.DP:
            tokens.append(f"{word}{sum(count for _, count, _ in spans)}")
        else:
            tokens += [token for _, _, token in spans]
    return "+".join(tokens)


def diff(old: Layout, new: Layout) -> frozenset[Rank]:
    """Return the affected ranks: those whose group (ranks or mode) changes, appears or disappears.

    All other ranks keep their group and keep serving through the switch.
    """
    changed = frozenset(old.groups) ^ frozenset(new.groups)
    return frozenset(rank for group in changed for rank in group.ranks)


def supported_layouts(
    world: int,
    widths: Collection[int],
    modes: Collection[Mode],
    mixed: Collection[Mixed] = (),
) -> tuple[Layout, ...]:
    """Return every layout that covers `world` ranks with these widths, modes and mixed groups.

    Stages of pp groups are one rank each.

    The order is the same on every rank: by the group of rank 0, narrow before wide, then mode in
    the order of `Mode`, mixed ones after the plain one, then likewise for the following ranks; so
    all-dp comes first. Ranks stand alone only if `modes` holds dp. Raises `LayoutError` for a world
    outside 1..MAX_ENUMERATED_WORLD or a width that is not a power of two.
    """
    if not 1 <= world <= MAX_ENUMERATED_WORLD:
        raise LayoutError(
            f"layouts are enumerated for 1 to {MAX_ENUMERATED_WORLD} ranks, not {world}."
        )
    ascending = sorted({1, *widths})
    for width in ascending:
        if width < 1 or width & (width - 1):
            raise LayoutError(f"width {width} is not a power of two.")
    wanted = [mode for mode in Mode if mode in modes]
    # Filled from the last rank back: all layouts of the ranks first..world-1.
    rest: dict[int, list[tuple[Group, ...]]] = {world: [()]}
    for first in range(world - 1, -1, -1):
        rest[first] = [
            (group, *tail)
            for group in _groups_from(first, world, ascending, wanted, sorted(set(mixed)))
            for tail in rest[first + group.width]
        ]
    return tuple(Layout(groups) for groups in rest[0])


def _groups_from(
    first: int,
    world: int,
    widths: Iterable[int],
    modes: Collection[Mode],
    mixed: Iterable[Mixed],
) -> Iterator[Group]:
    for width in widths:
        if first % width or first + width > world:
            continue
        ranks = tuple(Rank(rank) for rank in range(first, first + width))
        for mode in modes:
            if (mode is Mode.DP) == (width == 1):
                yield Group(ranks, mode)
            if mode in (Mode.SP, Mode.SHIFT):
                yield from (Group(ranks, mode, each.tp) for each in mixed if each.width == width)


def _alone(ranks: Iterable[Rank]) -> list[Group]:
    return [Group((rank,), Mode.DP) for rank in ranks]


def _spans(layout: Layout, world: int) -> Iterator[tuple[str, int, str]]:
    """Yield (word, ranks, token) from rank 0 to world-1, absent ranks included."""
    first = 0
    for group in layout.groups:
        if group.leader > first:
            yield _ABSENT, group.leader - first, f"{_ABSENT}{group.leader - first}"
        yield group.mode.value, group.width, group.name
        first = group.leader + group.width
    if world > first:
        yield _ABSENT, world - first, f"{_ABSENT}{world - first}"


def _proposal(text: str, world: int, widths: Collection[int]) -> str:
    """Return the end of a sentence about a text that is no layout: the likely one, or examples."""
    plain = re.sub(r"[\s_-]", "", text).lower()
    if plain != text:
        with suppress(LayoutError):
            parse_layout(plain, world, widths)
            return f"did you mean '{plain}'?"
    wide = sorted(width for width in set(widths) if width > 1 and world % width == 0)
    names = ["+".join([f"{Mode.TP}{width}"] * (world // width)) for width in wide]
    names += [f"{mode}{world}" for mode in (Mode.SP, Mode.SHIFT) if world in wide]
    if not names:
        return f"write '{Mode.DP}{world}'."
    return f"write one such as {', '.join([f'{Mode.DP}{world}', *names[:-1]])} or {names[-1]}."


def _read_token(token: str, text: str, world: int, widths: Collection[int]) -> tuple[str, int, int]:
    """Return (word, ranks, parts of the weights); the parts are 1 if the token names none."""
    if (found := _TOKEN_WITH_PARTS.fullmatch(token)) is not None:
        word, shares, parts = found[1], int(found[2]), int(found[3])
        return word, _divided(Mode(word), shares, parts).width, parts
    words = (*(mode.value for mode in Mode), _ABSENT)
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise LayoutError(
            f"'{token}' in layout '{text}' is not a word with a number; "
            f"{_proposal(text, world, widths)}"
        )
    word, count = match[1], int(match[2])
    if word not in words:
        served = ", ".join(mode.value for mode in Mode)
        raise LayoutError(
            f"'{word}' in layout '{text}' is not a mode; supported are {served}, and {_ABSENT} for "
            "ranks left out."
        )
    if count == 0:
        raise LayoutError(f"'{token}' in layout '{text}' has no ranks; leave it out.")
    return word, count, 1


def _check_parts(mode: Mode, width: int, parts: int) -> None:
    if mode not in (Mode.SP, Mode.SHIFT, Mode.PP):
        raise LayoutError(f"mode {mode} never has parts: only sp, shift and pp have.")
    divided = _divided(mode, width // parts if parts > 0 else 0, parts)
    if divided.width != width:
        raise LayoutError(f"{parts} parts do not divide a group {width} wide.")


def _divided(mode: Mode, shares: int, parts: int) -> Mixed | Staged:
    """Return what divides the groups of a mode: shares of tokens or stages, times parts."""
    try:
        return Staged(shares, parts) if mode is Mode.PP else Mixed(shares, parts)
    except (MixedError, StagedError) as error:
        raise LayoutError(str(error)) from None


def _check_inside(token: str, mode: Mode, width: int, parts: int, widths: Collection[int]) -> None:
    """Refuse a group of several parts whose members inside cannot communicate."""
    inside, what = (parts, "sums") if mode is Mode.PP else (width // parts, "exchanges heads")
    if inside not in widths:
        raise LayoutError(
            f"'{token}' {what} in groups of {inside} ranks, which is not a supported width."
        )


def _check_wide(token: str, width: int, first: int, widths: Collection[int]) -> None:
    if width == 1:
        raise LayoutError(f"'{token}' is a single rank, which has no peers; use 'dp1'.")
    if width not in widths:
        supported = ", ".join(str(each) for each in sorted({1, *widths}))
        raise LayoutError(
            f"width {width} of '{token}' is not supported; supported widths are {supported}: a "
            "cell has others when it starts with other --ranks and --widths."
        )
    if first % width:
        raise LayoutError(
            f"'{token}' would start at rank {first}, but a group {width} wide must start at a "
            f"multiple of {width}."
        )


def _coverage(text: str, how_many: str, world: int) -> str:
    return (
        f"layout '{text}' covers {how_many} {world} ranks, but must cover exactly {world} "
        f"(dpN counts N ranks, each alone)."
    )
