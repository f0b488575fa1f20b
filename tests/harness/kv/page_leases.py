"""Leases of a page pool as numbers that tests can compare."""

from kvadaptor.pages import GroupKey, PagePool


def lease(pool: PagePool, group: GroupKey, n: int) -> tuple[tuple[int, int], ...]:
    """Lease n pages; (lease index, page) of each."""
    indices, pages = pool.lease_pages(group, n)
    return tuple(zip(indices.tolist(), pages.tolist(), strict=True))


def lease_table(pool: PagePool, group: GroupKey) -> dict[int, int]:
    """Lease index -> page, without index 0; empty for an unknown group."""
    indices, pages = pool.lease_of(group)
    return dict(zip(indices.tolist(), pages.tolist(), strict=True))
