"""Which page of one rank belongs to whom.

Invariant: page 0 is reserved (vLLM's null block) and every other page is in exactly one place:
free, owned by the rank's own dp scheduler, or leased to one group; so
`reserved + free + owned + leased == total` after every operation. Same operations give the same
result on every rank, and an operation that fails changes nothing. Called by the rank, whose
schedulers and translation tables are fed from it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

NULL_PAGE = 0
"""The page that is never handed out; lease index 0 stands for it in every group."""

GroupKey = tuple[int, ...]
"""The member ranks of a group, ascending."""

_RESERVED, _FREE, _OWNED, _LEASED = range(4)


class PageError(ValueError):
    """More was asked for than there is, or named that is not there; nothing was changed."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by place; `leased` is by group, in order of the groups, without empty leases."""

    total: int
    reserved: int
    free: int
    owned: int
    leased: Mapping[GroupKey, int]


@dataclass(slots=True)
class _Lease:
    """Lease index -> page, and the lowest index that is not in use (indices start at 1)."""

    pages: dict[int, int] = field(default_factory=dict)
    lowest_unused: int = 1

    def unused(self, n: int) -> list[int]:
        """Return the n lowest indices not in use."""
        indices: list[int] = []
        index = self.lowest_unused
        while len(indices) < n:
            if index not in self.pages:
                indices.append(index)
            index += 1
        return indices


class PagePool:
    """The pages 0..num_pages-1 of one rank.

    A lease is a table from lease index to page. Members of a group have different pages but equal
    indices: indices are given lowest first, so members that keep the same set and lease the same
    number agree on them without a word. Handing out n pages costs O(n) plus a byte scan over pages
    in use, returning them O(n).
    """

    __slots__ = ("_free", "_leases", "_lowest_free", "_owned", "_place")

    def __init__(self, num_pages: int) -> None:
        """Start with page 0 reserved and all other pages free."""
        if num_pages < 1:
            raise PageError(f"a pool has at least the reserved page, not {num_pages} pages.")
        # One byte per page: a page cannot be in two places, and finding a free one is a memchr.
        self._place = bytearray([_FREE]) * num_pages
        self._place[NULL_PAGE] = _RESERVED
        # No page below it is free.
        self._lowest_free = 1
        self._free = num_pages - 1
        self._owned = 0
        self._leases: dict[GroupKey, _Lease] = {}

    def grant_own(self, n: int) -> tuple[int, ...]:
        """Move the n lowest free pages to the rank's own scheduler and return them, ascending.

        Raises `PageError` if fewer are free.
        """
        self._check_free(n)
        pages = self._take(n, _OWNED)
        self._owned += n
        self.integrity()
        return tuple(pages)

    def return_own(self, pages: Iterable[int]) -> None:
        """Move owned pages to free; `PageError` for a page named twice or not owned."""
        returned = list(pages)
        if len(set(returned)) < len(returned):
            raise PageError("a page is returned twice in one call.")
        for page in returned:
            if not (0 <= page < len(self._place) and self._place[page] == _OWNED):
                raise PageError(f"page {page} is returned, but is not owned.")
        self._owned -= len(returned)
        self._release(returned)
        self.integrity()

    def lease(self, group: GroupKey, n: int) -> tuple[tuple[int, int], ...]:
        """Move the n lowest free pages to a group's lease; return (lease index, page) pairs.

        The indices are the n lowest not in use, both ascend. Raises `PageError` if fewer than n
        pages are free.
        """
        if not group:
            raise PageError("a lease is for a group of at least one rank.")
        self._check_free(n)
        if n == 0:
            return ()
        lease = self._leases.setdefault(group, _Lease())
        added = tuple(zip(lease.unused(n), self._take(n, _LEASED), strict=True))
        lease.pages.update(added)
        lease.lowest_unused = added[-1][0] + 1
        self.integrity()
        return added

    def keep_only(self, group: GroupKey, indices: Collection[int]) -> None:
        """Free the pages of all lease indices but these; a repetition changes nothing.

        Index 0 may be named, as it always stands for the null page. Any other index that is not
        in use is a `PageError`.
        """
        lease = self._leases.get(group, _Lease())
        kept = set(indices)
        unknown = sorted(index for index in kept if index and index not in lease.pages)
        if unknown:
            raise PageError(f"lease index {unknown[0]} of group {group} is not in use.")
        dropped = [index for index in lease.pages if index not in kept]
        if not dropped:
            return
        self._release([lease.pages.pop(index) for index in dropped])
        lease.lowest_unused = min([lease.lowest_unused, *dropped])
        if not lease.pages:
            del self._leases[group]
        self.integrity()

    def lease_table(self, group: GroupKey) -> Mapping[int, int]:
        """Return lease index -> page as of now, without index 0; empty for an unknown group."""
        lease = self._leases.get(group)
        return MappingProxyType(dict(lease.pages) if lease else {})

    def slot_of(self, group: GroupKey, logical_block: int, k_slots: int) -> int:
        """Translate a group's logical block to this rank's slot number.

        Block j lies in the page of lease index j // k_slots, in its slot j % k_slots, where
        `k_slots` is the geometry's slots per page; so blocks 0..k_slots-1 are the null page. Raises
        `PageError` if the lease index is not in use.
        """
        if k_slots < 1 or logical_block < 0:
            raise PageError(f"there is no logical block {logical_block} at {k_slots} slots a page.")
        index, slot = divmod(logical_block, k_slots)
        page = NULL_PAGE if index == 0 else self._page_at(group, index)
        return page * k_slots + slot

    def counts(self) -> PageCounts:
        """Return how many pages are where."""
        return PageCounts(
            total=len(self._place),
            reserved=1,
            free=self._free,
            owned=self._owned,
            leased=MappingProxyType(
                {group: len(self._leases[group].pages) for group in sorted(self._leases)}
            ),
        )

    def integrity(self, *, full: bool = False) -> None:
        """Assert the invariant; costs O(groups), or O(pages) if `full`.

        An `AssertionError` means that the accounting itself is wrong, never its caller.
        """
        leased = sum(len(lease.pages) for lease in self._leases.values())
        total = len(self._place)
        assert min(self._free, self._owned) >= 0, "a page count is negative."
        assert 1 + self._free + self._owned + leased == total, (
            f"1 reserved + {self._free} free + {self._owned} owned + {leased} leased pages "
            f"are not {total}."
        )
        if full:
            self._check_places(leased)
            for group, lease in self._leases.items():
                _check_lease(group, lease)

    def _check_places(self, leased: int) -> None:
        place = self._place
        assert place[NULL_PAGE] == _RESERVED, "page 0 is not reserved."
        assert place.count(_RESERVED) == 1, "a page other than 0 is reserved."
        assert place.count(_FREE) == self._free, "the count of free pages is wrong."
        assert place.count(_OWNED) == self._owned, "the count of owned pages is wrong."
        assert place.count(_LEASED) == leased, "the count of leased pages is wrong."
        assert place.find(_FREE, 0, self._lowest_free) < 0, "a free page would not be found."
        pages = [page for lease in self._leases.values() for page in lease.pages.values()]
        assert len(set(pages)) == len(pages), "a page is leased twice."
        assert all(place[page] == _LEASED for page in pages), "a leased page is elsewhere too."

    def _check_free(self, n: int) -> None:
        if n < 0:
            raise PageError(f"a number of pages is not negative, as {n} is.")
        if n > self._free:
            raise PageError(f"{n} pages are asked for, but only {self._free} are free.")

    def _take(self, n: int, place: int) -> list[int]:
        """Mark the n lowest free pages, which the caller has checked to exist."""
        pages: list[int] = []
        page = self._lowest_free
        for _ in range(n):
            page = self._place.find(_FREE, page)
            assert page > 0, "fewer pages are free than counted."
            self._place[page] = place
            pages.append(page)
        self._free -= n
        self._lowest_free = page + 1 if pages else page
        return pages

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self._place[page] = _FREE
        self._free += len(pages)
        self._lowest_free = min([self._lowest_free, *pages])

    def _page_at(self, group: GroupKey, index: int) -> int:
        lease = self._leases.get(group)
        if lease is None or index not in lease.pages:
            raise PageError(f"lease index {index} of group {group} is not in use.")
        return lease.pages[index]


def _check_lease(group: GroupKey, lease: _Lease) -> None:
    assert lease.pages, f"group {group} keeps an empty lease."
    assert min(lease.pages) >= 1, f"group {group} uses a lease index below 1."
    assert all(index in lease.pages for index in range(1, lease.lowest_unused)), (
        f"group {group} has an unused lease index that would not be found."
    )
