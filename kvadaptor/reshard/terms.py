"""The input of a live KV re-shard plan, and the plan: frozen arrays, no decisions.

A *unit* is the finest piece of memory that moves. P is the largest number of pipeline stages of a
group of the component, T the largest number of ranges of heads, and U = P·T. A page is a grid of U
units: unit `U·page + T·a + c` has range a of the layers, [a·L/P, (a+1)·L/P), and range c of the
heads, [c·H/T, (c+1)·H/T), x b tokens. A *fragment* is what a unit holds: fragment T·a + c of a
block is its KV of those layers and heads. In dp, unit u of a page holds fragment u.

A group of width k has a split of its own, k = pp·tp, whose slots tile a page: slot `k·page + s` is
U/k units, a rectangle of the grid (`reshard.order`). The member at place r computes the fragments
that slot `Split.share_of(r)` of a dp page holds, and keeps one slot per logical block: those
fragments in order, in any slot of any page of its lease. Without pipeline stages P is 1, U is the
width of the component (its widest group, old or new), and a slot's units follow each other. Memory
layout: Flying Serving, section 4.2 (KV cache adaptor); re-sharding: Seesaw, section 4.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvadaptor.geometry import Split

Ints = npt.NDArray[np.int64]
"""Page, slot, unit, block or rank numbers."""

ROUNDS_MAX = 8
"""Default maximum of rounds of a plan; all ranks synchronize between two rounds."""

CACHED_ROUNDS_MAX = 2
"""Maximum rounds with cached chains, unless running tasks need more anyway."""


class ReshardError(ValueError):
    """An invalid input: overlapping groups, slots out of range; the message is one sentence."""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Blocks of one running task, or the blocks of one finished request that are worth keeping.

    `slots` is (k, blocks), int64: row r holds the slot numbers (in the width k of the old group) of
    the member at place r, column j those of logical block j. Equal columns in several chains of a
    group are one shared block. A task has a `tier` (smaller is more urgent); a `cached` chain has a
    `recency` (larger was used later) and no tier. `keys`, empty or one per block, identify content:
    blocks with the same key have the same content, None matches nothing. `id` is unique in the
    input.
    """

    id: str
    slots: Ints
    tier: int = 0
    cached: bool = False
    recency: int = 0
    keys: tuple[bytes | None, ...] = ()

    @property
    def size(self) -> int:
        """Number of blocks."""
        return int(self.slots.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class OldGroup:
    """A group before the switch: its ranks by place (ascending) and all chains it holds.

    `stages` are its pipeline stages, 1 in all other groups.
    """

    ranks: tuple[int, ...]
    chains: tuple[Chain, ...] = ()
    stages: int = 1

    @property
    def split(self) -> Split:
        """How its members divide KV."""
        return Split(self.stages, len(self.ranks) // self.stages)


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A group after the switch; `reserved_tiers` above 0: it is for tasks of lower tiers than that.

    Then other tasks go to other groups, and these tasks go to it, as far as pages allow. `stages`
    are its pipeline stages, 1 in all other groups.
    """

    ranks: tuple[int, ...]
    reserved_tiers: int = 0
    stages: int = 1

    @property
    def split(self) -> Split:
        """How its members divide KV."""
        return Split(self.stages, len(self.ranks) // self.stages)


@dataclass(frozen=True, slots=True, eq=False)
class EarlyBlocks:
    """Blocks of a chain that a rank holds as its new group reads them, copied before the plan.

    Block `places[i]` of chain `id`, counted from 0, lies in slot `slots[i]` of `rank`, a slot of
    the new group's width. Both are (n,).
    """

    id: str
    rank: int
    places: Ints
    slots: Ints


@dataclass(frozen=True, slots=True, eq=False)
class ReshardInput:
    """One component: the smallest aligned span that contains every old and new affected group.

    `old` and `new` each cover the same ranks exactly; one of these groups is the whole span. T must
    divide `num_kv_heads` (H), and P `num_layers` (L). `num_pages` counts the pages of each rank,
    page 0 included; ranks may differ. `free` is, per rank, the pages that have no owner or hold no
    chain's slot. A page in neither `free` nor a chain is never touched. The plan may use the pages
    of tasks that fall back. It carries cached chains only while it stays within
    `cached_rounds_max` rounds, or within as many as tasks need without them. Chains with `early`
    blocks go to the group that has them, as far as pages allow; their pages are not `free`.
    """

    num_kv_heads: int
    num_pages: Mapping[int, int]
    old: tuple[OldGroup, ...]
    new: tuple[NewGroup, ...]
    free: Mapping[int, Ints]
    rounds_max: int = ROUNDS_MAX
    cached_rounds_max: int = CACHED_ROUNDS_MAX
    early: tuple[EarlyBlocks, ...] = ()
    num_layers: int = 1


class FallbackCause(StrEnum):
    """Why a task is not carried."""

    PAGES = "pages"  # the new groups it could go to have too few pages
    ROUNDS = "rounds"  # there are pages, but not enough free ones to get there in `rounds_max`


@dataclass(frozen=True, slots=True)
class Fallback:
    """A task that keeps no KV; its caller recomputes it."""

    id: str
    cause: FallbackCause


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """Where a chain is after the switch.

    `group` indexes `ReshardPlan.groups`. `blocks` is (m,), int64: the group's logical block numbers
    of the chain's blocks 0..m-1, the same on all members (in dp: pages). m is the whole chain for a
    task and may be less for a cached chain, of whose `size` blocks a prefix is kept. `in_place`:
    none of its units is copied.
    """

    id: str
    cached: bool
    group: int
    blocks: Ints
    size: int
    in_place: bool


@dataclass(frozen=True, slots=True, eq=False)
class GroupLease:
    """A new group's pages after the switch: n of each member, all exclusively its own.

    `pages` is (k, n): row r the pages of the member at place r, ascending. `table` is (k, k·(n+1)):
    row r maps logical block L to that member's slot number; L = k·index + s for lease indices 1..n
    is a bijection onto the slots of its pages, used or not, and L < k is the null page. In dp there
    is no table, (1, 0): logical block is page. `used` are the logical blocks that hold a carried
    block, ascending; the others may be given out.
    """

    ranks: tuple[int, ...]
    pages: Ints
    table: Ints
    used: Ints

    @property
    def width(self) -> int:
        """Ranks of the group, k."""
        return len(self.ranks)

    @property
    def indices(self) -> int:
        """Number of lease indices in use, n: they are 1..n."""
        return int(self.pages.shape[1])

    def slots(self, blocks: Ints) -> Ints:
        """Return (k, m): every member's slot numbers of these logical blocks."""
        return blocks[np.newaxis].copy() if self.width == 1 else self.table[:, blocks]


@dataclass(frozen=True, slots=True, eq=False)
class UnitCopies:
    """All copies of one round into one rank; they may run in any order and all at once.

    `src_ranks`, `src_units`, `dst_units` are (c,), int64, sorted by source rank and then by
    destination unit. The source may be the destination rank itself.
    """

    round: int
    dst_rank: int
    src_ranks: Ints
    src_units: Ints
    dst_units: Ints


@dataclass(frozen=True, slots=True, eq=False)
class ReshardPlan:
    """What every rank does; the same input gives the same plan on every rank.

    `finest` is P and T: the units of a page are the slots of that split, and unit u of a page has
    layers of range u // T. `copies` is sorted by round (1..rounds) and destination, without empty
    ones; all ranks finish a round before any begins the next. No round writes a unit that it or a
    later round reads, and nothing kept in place is ever written, so a round's copies need no order.
    `groups` is in the order of `ReshardInput.new`; `carried` and `fallbacks` in that of the input's
    chains. `dropped` are cached chains of which nothing is kept, least recently used first.
    `in_place_units` counts the needed units that stay in place.
    """

    finest: Split
    rounds: int
    groups: tuple[GroupLease, ...]
    carried: tuple[Carried, ...]
    copies: tuple[UnitCopies, ...]
    fallbacks: tuple[Fallback, ...]
    dropped: tuple[str, ...]
    in_place_units: int

    @property
    def units(self) -> int:
        """Units of a page, U."""
        return self.finest.width
