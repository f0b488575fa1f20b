"""Page accounting under arbitrary operations, against a model and between two members.

The model is the plainest one: sets of pages and dicts. Two members of a group get the same lease
operations but have different pages, because each also serves its own dp scheduler.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvadaptor.pages import PageError, PagePool
from tests.harness.kv.page_leases import lease, lease_table

NUM_PAGES = 24
GROUPS = ((0, 1), (2, 3), (0, 1, 2, 3))
groups = st.sampled_from(GROUPS)
amounts = st.integers(0, 12)


class PoolAgainstModel(RuleBasedStateMachine):
    """One pool; the model says which result or refusal is right."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.owned: set[int] = set()
        self.leases: dict[tuple[int, ...], dict[int, int]] = {group: {} for group in GROUPS}

    def free(self) -> list[int]:
        leased = {page for lease in self.leases.values() for page in lease.values()}
        return [page for page in range(1, NUM_PAGES) if page not in self.owned | leased]

    @rule(n=amounts)
    def grant(self, n: int) -> None:
        free = self.free()
        try:
            pages = self.pool.grant_own_pages(n).tolist()
        except PageError:
            assert n > len(free)
        else:
            assert pages == free[:n]
            assert len(pages) == n
            self.owned |= set(pages)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.integers(-1, NUM_PAGES), max_size=4))
        if self.owned:
            pages = data.draw(st.sampled_from([pages, sorted(self.owned)[: len(pages)]]))
        try:
            self.pool.keep_own(np.array(pages, dtype=np.int64))
        except PageError:
            assert not set(pages) <= self.owned
        else:
            assert set(pages) <= self.owned
            self.owned = set(pages)

    @rule(group=groups, n=amounts)
    def lease(self, group: tuple[int, ...], n: int) -> None:
        free, leased = self.free(), self.leases[group]
        try:
            added = lease(self.pool, group, n)
        except PageError:
            assert n > len(free)
            return
        unused = [index for index in range(1, NUM_PAGES + n) if index not in leased][:n]
        assert added == tuple(zip(unused, free[:n], strict=True))
        leased.update(added)

    @rule(data=st.data())
    def own_named(self, data: st.DataObject) -> None:
        named = data.draw(st.lists(st.integers(-1, NUM_PAGES), max_size=4))
        free = self.free()
        if data.draw(st.booleans()):
            named = free[-len(named) :]
        try:
            self.pool.own_these(np.array(named, dtype=np.int64))
        except PageError:
            assert not set(named) <= set(free) or len(set(named)) < len(named)
        else:
            assert set(named) <= set(free)
            self.owned |= set(named)

    @rule(group=groups, data=st.data())
    def lease_named(self, group: tuple[int, ...], data: st.DataObject) -> None:
        free, lease = self.free(), self.leases[group]
        named = data.draw(st.lists(st.sampled_from(free), max_size=4)) if free else []
        size = len(named)
        indices = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
        arrays = [np.array(each, dtype=np.int64) for each in (indices, named)]
        may = len(set(named)) == size == len(set(indices)) and not set(indices) & {0, *lease}
        try:
            self.pool.lease_these(group, *arrays)
        except PageError:
            assert not may
        else:
            assert may
            lease.update(zip(indices, named, strict=True))

    @rule(group=groups, indices=st.lists(st.integers(-1, 6), max_size=4))
    def free_any(self, group: tuple[int, ...], indices: list[int]) -> None:
        lease = self.leases[group]
        may = set(indices) <= set(lease) and len(set(indices)) == len(indices)
        assert self.pool.are_leased(group, np.array(indices, dtype=np.int64)) == (
            set(indices) <= set(lease)
        )
        named = np.array([each for each in indices if each >= 0], dtype=np.int64)
        found = self.pool.in_use(group, named).tolist()
        assert found == [each for each in named.tolist() if each in lease]
        try:
            self.pool.free_leased(group, np.array(indices, dtype=np.int64))
        except PageError:
            assert not may
        else:
            assert may
            self.leases[group] = {i: page for i, page in lease.items() if i not in indices}

    @rule(group=groups, indices=st.frozensets(st.integers(0, 6)))
    def keep_any(self, group: tuple[int, ...], indices: frozenset[int]) -> None:
        lease = self.leases[group]
        try:
            self.pool.keep_only(group, indices)
        except PageError:
            assert not indices <= {0, *lease}
        else:
            assert indices <= {0, *lease}
            self.leases[group] = {i: page for i, page in lease.items() if i in indices}

    @rule(group=groups, data=st.data())
    def keep_known(self, group: tuple[int, ...], data: st.DataObject) -> None:
        lease = self.leases[group]
        kept = {index for index in lease if data.draw(st.booleans())}
        self.pool.keep_only(group, kept)
        self.pool.keep_only(group, kept)
        self.leases[group] = {index: lease[index] for index in kept}

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.integrity(full=True)
        counts = self.pool.counts()
        assert (counts.total, counts.reserved) == (NUM_PAGES, 1)
        assert (counts.free, counts.owned) == (len(self.free()), len(self.owned))
        assert counts.leased == {group: len(lease) for group, lease in self.leases.items() if lease}
        for group, leased in self.leases.items():
            assert lease_table(self.pool, group) == leased
        assert set(self.pool.groups()) == {group for group in GROUPS if self.leases[group]}
        assert self.pool.free_pages().tolist() == self.free()
        assert self.pool.own_pages().tolist() == sorted(self.owned)


class TwoMembers(RuleBasedStateMachine):
    """Two ranks of one group, each busy with work of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.members = (PagePool(NUM_PAGES), PagePool(2 * NUM_PAGES))
        self.owned: tuple[list[int], list[int]] = ([], [])

    @rule(member=st.sampled_from([0, 1]), n=amounts)
    def own_work(self, member: int, n: int) -> None:
        pool, owned = self.members[member], self.owned[member]
        owned += pool.grant_own_pages(min(n, pool.counts().free)).tolist()

    @rule(member=st.sampled_from([0, 1]), data=st.data())
    def own_work_ends(self, member: int, data: st.DataObject) -> None:
        owned = self.owned[member]
        ended = [page for page in owned if data.draw(st.booleans())]
        owned[:] = [page for page in owned if page not in ended]
        self.members[member].keep_own(np.array(owned, dtype=np.int64))

    @rule(group=groups, n=amounts)
    def lease(self, group: tuple[int, ...], n: int) -> None:
        granted = min(n, *(pool.counts().free for pool in self.members))
        first, second = (lease(pool, group, granted) for pool in self.members)
        assert [index for index, _ in first] == [index for index, _ in second]

    @rule(group=groups, data=st.data())
    def keep(self, group: tuple[int, ...], data: st.DataObject) -> None:
        indices = lease_table(self.members[0], group)
        kept = {index for index in indices if data.draw(st.booleans())}
        for pool in self.members:
            pool.keep_only(group, kept)

    @invariant()
    def members_agree_on_indices(self) -> None:
        for pool in self.members:
            pool.integrity(full=True)
        for group in GROUPS:
            first, second = (lease_table(pool, group) for pool in self.members)
            assert set(first) == set(second)


# Twenty steps fill and drain the pools several times; more would only take longer.
_SETTINGS = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = _SETTINGS
TestTwoMembers = TwoMembers.TestCase
TestTwoMembers.settings = _SETTINGS
