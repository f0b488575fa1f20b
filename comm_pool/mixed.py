"""Groups that divide two things at once: who computes what, who communicates with whom.

Mixed groups divide tokens and weights. In a group `sp2tp2` the weights fall into n = 2 parts and a
step's tokens into m = 2 shares; each of the m·n members computes one share with one part (Shift
Parallelism, section 3.3.1). In the paper tp groups are contiguous and sp groups strided, so a
member's heads differ from full tp and the tp model must be loaded in another order. Here the m
neighbouring members hold the same part, so their all-to-all gives each the heads that it has in
full tp of the same width.

Pipeline groups divide layers, and their stages may divide weights. In a group `pp2tp2` the layers
fall into two pipeline stages, and the weights of each stage into two parts (Seesaw, section 4.1).
Stages run from the highest rank down to the leader, so the leader has the last one: it samples, and
nothing has to come back to it. Members of a stage are neighbours, so the groups that sum are
aligned ones, which the cell has anyway. Pure.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_NOTATION = re.compile(r"sp([1-9][0-9]{0,3})tp([1-9][0-9]{0,3})")
_STAGED_NOTATION = re.compile(r"pp([1-9][0-9]{0,3})(?:tp([1-9][0-9]{0,3}))?")


class MixedError(ValueError):
    """An impossible combination of sp and tp; the message is one sentence."""


@dataclass(frozen=True, slots=True, order=True)
class Mixed:
    """`sp` shares of tokens times `tp` parts of weights, both powers of two and at least 2.

    Members are numbered by their place in the group, 0..width-1. Other numbers raise `MixedError`.
    """

    sp: int
    tp: int

    def __post_init__(self) -> None:
        """Refuse numbers that do not make a mixed group."""
        for word, count in (("sp", self.sp), ("tp", self.tp)):
            if count < 1 or count & (count - 1):
                raise MixedError(f"{word}{count} in '{self}' is not a power of two.")
        if self.sp == 1:
            raise MixedError(f"'{self}' shares out no tokens; use 'tp{self.tp}'.")
        if self.tp == 1:
            raise MixedError(f"'{self}' splits no weights; use 'sp{self.sp}'.")

    def __str__(self) -> str:
        """Return the notation."""
        return f"sp{self.sp}tp{self.tp}"

    @property
    def width(self) -> int:
        """Members of a group."""
        return self.sp * self.tp

    def share_of(self, member: int) -> int:
        """Return the share of a step's tokens that a member computes, 0..sp-1."""
        return member % self.sp

    def reducing_with(self, member: int) -> range:
        """Return the members with the same tokens, by part: they sum the results of their parts."""
        return range(self.share_of(member), self.width, self.sp)


class StagedError(ValueError):
    """An impossible combination of pp and tp; the message is one sentence."""


@dataclass(frozen=True, slots=True, order=True)
class Staged:
    """`pp` pipeline stages times `tp` parts of weights, powers of two, at least two stages.

    Members are numbered by their place in the group, 0..width-1. Other numbers raise `StagedError`.
    """

    pp: int
    tp: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers that do not make a pipeline group."""
        for word, count in (("pp", self.pp), ("tp", self.tp)):
            if count < 1 or count & (count - 1):
                raise StagedError(f"{word}{count} in '{self}' is not a power of two.")
        if self.pp == 1:
            other = f"tp{self.tp}" if self.tp > 1 else "dp1"
            raise StagedError(f"'{self}' has a single stage; use '{other}'.")

    def __str__(self) -> str:
        """Return the notation, such as `pp4` or `pp2tp2`."""
        return f"pp{self.pp}" if self.tp == 1 else f"pp{self.pp}tp{self.tp}"

    @property
    def width(self) -> int:
        """Members of a group."""
        return self.pp * self.tp


def read_mixed(text: str) -> Mixed:
    """Read the notation, such as `sp2tp2`; raises `MixedError`."""
    match = _NOTATION.fullmatch(text)
    if match is None:
        raise MixedError(f"'{text}' is not a mixed group, such as 'sp2tp2'.")
    return Mixed(int(match[1]), int(match[2]))


def read_staged(text: str) -> Staged:
    """Read the notation, such as `pp4` or `pp2tp2`; raises `StagedError`."""
    match = _STAGED_NOTATION.fullmatch(text)
    if match is None:
        raise StagedError(f"'{text}' is not a pipeline group, such as 'pp2'.")
    return Staged(int(match[1]), int(match[2] or 1))


def shape_of_parts(width: int, parts: int) -> Mixed | None:
    """Return the shape whose parts the ranks of a group hold; None if these are full tp's.

    `parts` divides the width and is above 1.
    """
    return Mixed(width // parts, parts) if parts < width else None


def reducing_groups(world: int, mixed: Iterable[Mixed]) -> dict[Mixed, list[list[int]]]:
    """Return for each mixed shape the strided groups that reduce, in one order on every rank.

    Each rank of the world is in exactly one group of each shape. The groups that exchange are
    aligned ones, which the cell has anyway.
    """
    return {
        each: [
            [first + member for member in each.reducing_with(share)]
            for first in range(0, world, each.width)
            for share in range(each.sp)
        ]
        for each in sorted(set(mixed))
    }
