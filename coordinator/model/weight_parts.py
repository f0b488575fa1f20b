"""Which part of the weights each rank holds, and which parts nobody could lend to a group. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

from comm_pool.layout import Group, Rank
from comm_pool.loans import part_of


@dataclass(frozen=True, slots=True)
class WeightParts:
    """How the ranks of a cell divide the weights: by default each of them holds all.

    Each `width` aligned ranks hold all `count` parts together, neighbours the same one.
    """

    count: int = 1
    width: int = 1
    borrows: bool = False
    """Whether a group reads the parts that it lacks from ranks outside of it."""
    outlive: bool = False
    """Whether the memory of a rank that has ended can still be read."""

    def part_of(self, rank: Rank) -> int:
        """Return the part that the rank holds."""
        return part_of(rank % self.width, self.width, self.count)

    def sharing_with(self, rank: Rank) -> tuple[Rank, ...]:
        """Return the ranks that hold all parts together, with this one among them."""
        first = rank - rank % self.width
        return tuple(map(Rank, range(first, first + self.width)))

    def holders(self, part: int, rank: Rank) -> tuple[Rank, ...]:
        """Return the ranks that can lend this part to a rank, as far as their memory is readable.

        The rank itself is among them if it holds the part.
        """
        return tuple(each for each in self.sharing_with(rank) if self.part_of(each) == part)

    def lacking(self, group: Group, readable: Collection[Rank]) -> int | None:
        """Return the first part that the group neither holds nor can read; None if it has all."""
        sources = {*group.ranks, *readable} if self.borrows else set(group.ranks)
        return next(
            (
                part
                for part in range(self.count)
                if sources.isdisjoint(self.holders(part, group.leader))
            ),
            None,
        )
