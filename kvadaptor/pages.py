"""The ownership of each page of one rank.

Invariant: page 0 is reserved (vLLM's null block) and every other page is in exactly one place:
free, owned by the rank's own dp scheduler, or leased to one group; so `reserved + free + owned +
leased == total` after every operation. Equal operations give equal results on every rank, and a
failed operation changes nothing. Called by the rank, which feeds its schedulers and translation
tables from it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

NULL_PAGE = 0
"""The page that is never given out; lease index 0 stands for it in every group."""

Pages = npt.NDArray[np.int64]
"""Page numbers or lease indices, ascending unless noted otherwise."""

GroupKey = tuple[int, ...]
"""The member ranks of a group, in the order of what they hold (`Group.lease_key`)."""

_RESERVED, _FREE, _OWNED, _LEASED = range(4)
_NO_LEASE: Pages = np.zeros(1, dtype=np.int64)


class PageError(ValueError):
    """The request exceeds the free pages or names an unknown one; nothing was changed."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by place; `leased` is by group, in order of the groups, without empty leases."""

    total: int
    reserved: int
    free: int
    owned: int
    leased: Mapping[GroupKey, int]


class PagePool:
    """The pages 0..num_pages-1 of one rank.

    A lease is a table from lease index to page. Members of a group have different pages but equal
    indices: the lowest indices are given first, so members that keep the same set and lease the
    same number agree without communication. A switch moves all pages of a device at once, so every
    operation is a few array operations over the pool: a million pages take milliseconds.
    """

    __slots__ = ("_free", "_leases", "_owned", "_place", "_sizes")

    def __init__(self, num_pages: int) -> None:
        """Start with page 0 reserved and all other pages free."""
        if num_pages < 1:
            raise PageError(f"a pool has at least the reserved page, not {num_pages} pages.")
        # One byte per page: a page cannot be in two places.
        self._place: npt.NDArray[np.uint8] = np.full(num_pages, _FREE, dtype=np.uint8)
        self._place[NULL_PAGE] = _RESERVED
        self._free = num_pages - 1
        self._owned = 0
        # Group -> table of pages by lease index; 0 marks an unused index.
        self._leases: dict[GroupKey, Pages] = {}
        self._sizes: dict[GroupKey, int] = {}
        """How many indices of each table are in use."""

    def __repr__(self) -> str:
        """Return the pages by place: ranges of own pages, and of each group's lease indices."""
        parts = [f"{self._free} of {self._place.size} pages free"]
        if self._owned:
            parts.append(f"owned {_ranges(self.own_pages())}")
        for group in sorted(self._leases):
            ranks = "-".join(map(str, group))
            parts.append(f"leased to {ranks} as {_ranges(self.lease_indices(group))}")
        return f"<{', '.join(parts)}>"

    def grant_own_pages(self, n: int) -> Pages:
        """Move the n lowest free pages to the rank's own scheduler and return them, ascending.

        Raises `PageError` if fewer are free.
        """
        self._check_free(n)
        pages = self._take(n, _OWNED)
        self._owned += n
        self.integrity()
        return pages

    def own_pages(self) -> Pages:
        """Return all pages that the rank's own scheduler has."""
        return np.flatnonzero(self._place == _OWNED)

    def keep_own(self, pages: Pages) -> None:
        """Move all other owned pages to free; `PageError` for one of these that is not owned."""
        inside = (pages >= 0) & (pages < self._place.size)
        inside[inside] = self._place[pages[inside]] == _OWNED
        if not inside.all():
            raise PageError(f"page {pages[~inside][0]} is to stay, but is not owned.")
        returned = self._place == _OWNED
        returned[pages] = False
        np.copyto(self._place, _FREE, where=returned)
        count = int(np.count_nonzero(returned))
        self._owned -= count
        self._free += count
        self.integrity()

    def lease_pages(self, group: GroupKey, n: int) -> tuple[Pages, Pages]:
        """Move the n lowest free pages to a group's lease; return the lease indices and the pages.

        The indices are the n lowest not in use, both ascend. Raises `PageError` if fewer than n
        pages are free.
        """
        if not group:
            raise PageError("a lease is for a group of at least one rank.")
        self._check_free(n)
        if n == 0:
            return _as_pages(()), _as_pages(())
        table = self._leases.get(group, _NO_LEASE)
        indices = np.flatnonzero(table[1:] == 0)[:n] + 1
        missing = n - indices.size
        if missing:
            fresh = np.arange(table.size, table.size + missing)
            table = np.concatenate([table, np.zeros(missing, dtype=np.int64)])
            indices = np.concatenate([indices, fresh])
        pages = self._take(n, _LEASED)
        table[indices] = pages
        self._leases[group] = table
        self._sizes[group] = self._sizes.get(group, 0) + n
        self.integrity()
        return indices, pages

    def own_these(self, pages: Pages) -> None:
        """Move exactly these pages to the rank's own scheduler; `PageError` if one is not free."""
        self._take_these(pages, _OWNED)
        self._owned += pages.size
        self.integrity()

    def lease_these(self, group: GroupKey, indices: Pages, pages: Pages) -> None:
        """Lease page `pages[i]` under index `indices[i]`, for all i.

        Raises `PageError` for a page that is not free or an index in use, and for repeated ones.
        """
        if not group or indices.size != pages.size or not _all_differ(indices):
            raise PageError("a lease needs a group, and as many different indices as pages.")
        table = self._leases.get(group, _NO_LEASE)
        last = int(indices.max(initial=0))
        if last >= table.size:
            fresh = np.zeros(last + 1 - table.size, dtype=np.int64)
            table = np.concatenate([table, fresh])
        if indices.size and (indices.min() < 1 or table[indices].any()):
            raise PageError(f"a lease index of group {group} is 0 or in use.")
        self._take_these(pages, _LEASED)
        table[indices] = pages
        if pages.size:
            self._leases[group] = table
            self._sizes[group] = self._sizes.get(group, 0) + pages.size
        self.integrity()

    def free_pages(self) -> Pages:
        """Return all pages that are free."""
        return np.flatnonzero(self._place == _FREE)

    def lease_of(self, group: GroupKey) -> tuple[Pages, Pages]:
        """Return the lease indices in use, without index 0, and the page of each."""
        indices = self.lease_indices(group)
        return indices, self._leases[group][indices] if indices.size else indices

    def groups(self) -> tuple[GroupKey, ...]:
        """Return the groups with a lease."""
        return tuple(self._leases)

    def keep_only(self, group: GroupKey, indices: Collection[int]) -> None:
        """Free the pages of all other lease indices; idempotent.

        Index 0 may be given, as it always stands for the null page. Raises `PageError` for any
        other index that is not in use.
        """
        wanted = _as_pages(sorted(set(indices) - {0}))
        self._check_leased(group, wanted)
        self.free_leased(group, self.lease_without(group, wanted))

    def free_leased(self, group: GroupKey, indices: Pages) -> Pages:
        """Free the pages of these lease indices and return them, in their order.

        Raises `PageError` for an index that is not in use, or named twice.
        """
        self._check_leased(group, indices)
        pages = self._leases.get(group, _NO_LEASE).take(indices)
        if not indices.size:
            return pages
        if not _all_differ(indices):
            raise PageError("a lease index is given up twice in one call.")
        self._release(pages)
        self._leases[group][indices] = 0
        self._sizes[group] -= indices.size
        if not self._sizes[group]:
            del self._leases[group], self._sizes[group]
        self.integrity()
        return pages

    def lease_indices(self, group: GroupKey) -> Pages:
        """Return the lease indices in use, without index 0."""
        # NumPy finds the true ones of an array of bytes in a third of the time.
        return np.flatnonzero(self._leases.get(group, _NO_LEASE) != 0)

    def lease_without(self, group: GroupKey, indices: Pages) -> Pages:
        """Return the lease indices in use, without index 0 and these; some may be unused."""
        others = self._leases.get(group, _NO_LEASE) != 0
        others[indices[indices < others.size]] = False
        return np.flatnonzero(others)

    def are_leased(self, group: GroupKey, indices: Pages) -> bool:
        """Return whether all of these lease indices are in use."""
        table = self._leases.get(group, _NO_LEASE)
        inside = not indices.size or (indices.min() > 0 and indices.max() < table.size)
        return bool(inside and table.take(indices).all())

    def in_use(self, group: GroupKey, indices: Pages) -> Pages:
        """Return those of these lease indices, of which none is negative, that are in use."""
        table = self._leases.get(group, _NO_LEASE)
        inside = indices[indices < table.size]
        found: Pages = inside[table.take(inside) != 0]
        return found

    def counts(self) -> PageCounts:
        """Return the number of pages in each place."""
        leased = {group: self._sizes[group] for group in sorted(self._sizes)}
        return PageCounts(
            total=self._place.size,
            reserved=1,
            free=self._free,
            owned=self._owned,
            leased=MappingProxyType(leased),
        )

    def integrity(self, *, full: bool = False) -> None:
        """Assert the invariant; costs a pass over all pages if `full`.

        An `AssertionError` means that the accounting itself is wrong, never its caller.
        """
        leased = sum(self._sizes.values())
        total = self._place.size
        assert min(self._free, self._owned) >= 0, "a page count is negative."
        assert 1 + self._free + self._owned + leased == total, (
            f"1 reserved + {self._free} free + {self._owned} owned + {leased} leased pages "
            f"are not {total}."
        )
        if full:
            self._check_places(leased)

    def _check_places(self, leased: int) -> None:
        place = self._place
        count = np.bincount(place, minlength=4)
        assert place[NULL_PAGE] == _RESERVED, "page 0 is not reserved."
        assert count[_RESERVED] == 1, "a page other than 0 is reserved."
        assert count[_FREE] == self._free, "the count of free pages is wrong."
        assert count[_OWNED] == self._owned, "the count of owned pages is wrong."
        assert count[_LEASED] == leased, "the count of leased pages is wrong."
        sizes = {key: int(np.count_nonzero(table)) for key, table in self._leases.items()}
        assert sizes == self._sizes, "the size of a lease is wrong."
        assert all(sizes.values()), "a group keeps an empty lease."
        assert not any(table[0] for table in self._leases.values()), "lease index 0 is in use."
        if self._leases:
            pages = np.concatenate([table[table != 0] for table in self._leases.values()])
            assert np.unique(pages).size == pages.size, "a page is leased twice."
            assert (place[pages] == _LEASED).all(), "a leased page is elsewhere too."

    def _check_free(self, n: int) -> None:
        if n < 0:
            raise PageError(f"a number of pages must not be negative, but is {n}.")
        if n > self._free:
            raise PageError(f"{n} pages are asked for, but only {self._free} are free.")

    def _check_leased(self, group: GroupKey, indices: Pages) -> None:
        if not self.are_leased(group, indices):
            wrong = next(each for each in indices if not self.are_leased(group, np.array([each])))
            raise PageError(f"lease index {wrong} of group {group} is not in use.")

    def _take(self, n: int, place: int) -> Pages:
        """Move the n lowest free pages to `place`; the caller has checked that they exist."""
        is_taken = self._place == _FREE
        pages = np.flatnonzero(is_taken)[:n]
        assert pages.size == n, "fewer pages are free than counted."
        if n < self._free:
            is_taken[pages[-1] + 1 if n else 0 :] = False
        np.copyto(self._place, place, where=is_taken)
        self._free -= n
        return pages

    def _take_these(self, pages: Pages, place: int) -> None:
        inside = pages.size == 0 or (pages.min() >= 0 and pages.max() < self._place.size)
        if not inside or (self._place[pages] != _FREE).any():
            raise PageError("a page that is asked for by number is not free.")
        if not _all_differ(pages):
            raise PageError("a page is asked for twice in one call.")
        self._place[pages] = place
        self._free -= pages.size

    def _release(self, pages: Pages) -> None:
        self._place[pages] = _FREE
        self._free += pages.size


def distinct(numbers: npt.NDArray[np.int64], below: int) -> Pages:
    """Return the distinct ones of these numbers from 0 to `below` - 1, ascending.

    Linear time: NumPy's own way sorts or hashes, which takes 20 times as long.
    """
    named = np.zeros(below, dtype=np.bool_)
    named[numbers] = True
    return np.flatnonzero(named)


def _ranges(numbers: Pages) -> str:
    """Return ascending numbers as ranges, such as `1-3+7`."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    ends = ((int(run[0]), int(run[-1])) for run in runs if run.size)
    return "+".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def _all_differ(numbers: Pages) -> bool:
    """Return whether page numbers or lease indices are distinct; negative ones are not checked."""
    if not numbers.size or numbers.min() < 0:
        return True
    if (numbers[1:] > numbers[:-1]).all():
        return True
    return distinct(numbers, int(numbers.max()) + 1).size == numbers.size


def without(pages: Pages, others: Pages) -> Pages:
    """Return those of `pages` that are not among `others`; linear in the largest number."""
    return pages[~np.isin(pages, others, kind="table")] if others.size else pages


def _as_pages(numbers: Iterable[int]) -> Pages:
    return np.fromiter(numbers, dtype=np.int64)
