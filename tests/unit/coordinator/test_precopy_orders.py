"""When the coordinator asks ranks to copy KV before they leave their groups, and for how long."""

from collections.abc import Mapping

import pytest

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import PreCopyOrder, PreCopyProgress
from coordinator.protocol.terms import Carry, Phase
from coordinator.switching.precopy import LIMIT_MS, REST_BYTES, ROUNDS_MAX
from tests.harness.coordinator.builders import layout, report
from tests.harness.coordinator.switchers import Ranks

MUCH = 2 * REST_BYTES


class Serving(Ranks):
    """Four ranks that serve `tp2+dp2`; the two that are alone run tasks."""

    def __init__(self, *, precopy: bool = True) -> None:
        super().__init__(precopy=precopy)
        self.serve()
        self.bindings = self.switcher.target.bindings
        self.target = self.switcher.target
        self.stage = self.switcher.stage
        self.report()

    def report(self, rounds: Mapping[int, tuple[int, int]] | None = None) -> None:
        """Let all ranks report; `rounds` are the (round, bytes) that each has copied."""
        for rank in range(4):
            binding = self.target.binding_of(Rank(rank))
            progress = None
            if rounds is not None and rank in rounds:
                progress = PreCopyProgress(self.switcher.epoch, *rounds[rank])
            self.hear_old(rank, binding, progress)

    def hear_old(self, rank: int, binding: object, progress: PreCopyProgress | None) -> None:
        """Let a rank report that it still serves its old group."""
        said = report(
            rank,
            self.stage,
            sent_at_ms=self.now_ms,
            binding=binding,  # type: ignore[arg-type]
            target=self.target,
            running=2,
            blocks_free=6,
            blocks_total=10,
            precopy=progress,
        )
        assert self.roster.on_report(said, self.now_ms)
        self.switcher.on_report(said, self.now_ms)

    def switch(self, wanted: str = "tp2+tp2", carry: Carry = Carry.RESHARD) -> None:
        """Want another layout."""
        self.switcher.retarget(layout(wanted), carry, "test", self.now_ms)

    def order(self) -> PreCopyOrder | None:
        """Return what rank 2 is asked to copy."""
        directive = self.switcher.directive_for(Rank(2))
        assert directive is not None
        return directive.precopy

    def round(self) -> int:
        """Return the round that rank 2 is asked for; 0 is none."""
        order = self.order()
        return order.round if order is not None else 0

    def drafts(self) -> int:
        """Return the round in which rank 2 is asked to draft a plan; 0 is none."""
        order = self.order()
        return order.round if order is not None and order.drafts else 0

    def drafted(self) -> int:
        """Return the round in which all have drafted, as rank 2 hears; 0 is none."""
        directive = self.switcher.directive_for(Rank(2))
        assert directive is not None
        return directive.drafted


def test_groups_that_change_copy_while_they_serve() -> None:
    ranks = Serving()
    ranks.switch()
    assert ranks.switcher.is_precopying
    order = ranks.order()
    assert order is not None
    # Each has 4 pages in use and 6 free: half of these, and of two ranks' 8 pages an even share.
    assert [(each.ranks, each.pages) for each in order.grants] == [((2,), 3), ((3,), 3)]


def test_a_round_that_brought_little_is_the_last_that_copies() -> None:
    ranks = Serving()
    ranks.switch()
    ranks.report({2: (1, MUCH), 3: (0, 0)})
    assert ranks.round() == 1, "rank 3 still copies"
    ranks.report({2: (1, MUCH), 3: (1, 5)})
    assert ranks.round() == 2
    ranks.report({2: (2, MUCH + 7), 3: (2, 9)})
    assert ranks.drafts() == 3
    ranks.report({2: (3, MUCH + 7), 3: (3, 9)})
    assert not ranks.round()
    assert ranks.drafted() == 3
    assert ranks.switcher.stage.phase is Phase.PARK
    (record,) = [each for each in ranks.switcher.log.last(9) if each.epoch == ranks.switcher.epoch]
    assert (record.precopy_rounds, record.precopy_bytes) == (2, MUCH + 16)


def test_rounds_are_bounded() -> None:
    ranks = Serving()
    ranks.switch()
    for number in range(1, ROUNDS_MAX + 1):
        assert (ranks.round(), ranks.drafts()) == (number, 0)
        ranks.report({2: (number, number * MUCH), 3: (number, 0)})
    assert ranks.drafts() == ROUNDS_MAX + 1


def test_the_switch_waits_for_all_drafts() -> None:
    ranks = Serving()
    ranks.switch()
    first = ranks.order()
    ranks.report({2: (1, 0), 3: (1, 0)})
    last = ranks.order()
    assert first is not None and last is not None
    assert last.drafts and last.grants == first.grants, "no more pages are set aside"
    ranks.report({2: (2, 0), 3: (1, 0)})
    assert ranks.drafts() == 2, "rank 3 still drafts"
    ranks.now_ms += LIMIT_MS
    ranks.report({2: (2, 0), 3: (1, 0)})
    assert not ranks.round(), "it took too long"
    assert not ranks.drafted()


def test_a_draft_is_worth_nothing_to_another_switch() -> None:
    ranks = Serving()
    ranks.switch()
    ranks.report({2: (1, 0), 3: (1, 0)})
    ranks.report({2: (2, 0), 3: (2, 0)})
    assert ranks.drafted() == 2
    ranks.switch("tp4")
    assert not ranks.drafted()


def test_ranks_hear_of_drafts_until_they_have_left() -> None:
    ranks = Serving()
    ranks.switch()
    ranks.report({2: (1, 0), 3: (1, 0)})
    assert not ranks.drafted()
    ranks.report({2: (2, 0), 3: (2, 0)})
    assert ranks.drafted() == 2
    ranks.acknowledge()
    assert ranks.switcher.stage.phase > Phase.PARK
    assert not ranks.drafted()


def test_their_time_is_bounded() -> None:
    ranks = Serving()
    ranks.switch()
    for _ in range(LIMIT_MS // 500 - 1):
        ranks.now_ms += 500
        ranks.report()
        ranks.tick()
        assert ranks.round()
    ranks.now_ms += 500
    ranks.report()
    ranks.tick()
    assert not ranks.switcher.is_precopying
    assert not ranks.round()


@pytest.mark.parametrize("carry", [Carry.PAUSE, Carry.RECOMPUTE, Carry.DRAIN])
def test_another_plan_ends_them(carry: Carry) -> None:
    ranks = Serving()
    ranks.switch()
    ranks.switch(carry=carry)
    assert not ranks.round()
    ranks.switcher.integrity()


def test_another_layout_ends_them() -> None:
    ranks = Serving()
    ranks.switch()
    ranks.switch("tp4")
    assert not ranks.round(), "a switch in progress goes on at once"


def test_ranks_that_have_left_their_groups_copy_no_more() -> None:
    """A group leaves although copies go on, if its formation was aborted."""
    ranks = Serving()
    ranks.switch()
    assert ranks.round()
    ranks.acknowledge()
    assert ranks.switcher.stage.phase > Phase.PARK
    ranks.switcher.integrity()
    assert not ranks.round()


def test_a_lost_rank_ends_them() -> None:
    ranks = Serving()
    ranks.switch()
    ranks.switcher.lose([Rank(3)], ranks.now_ms)
    assert not ranks.round()


def test_a_switch_that_waited_for_tasks_copies_the_rest_early() -> None:
    ranks = Serving()
    ranks.switch(carry=Carry.SPECULATE)
    assert not ranks.round()
    ranks.switcher.end_wait(ranks.now_ms)
    assert ranks.round()


@pytest.mark.parametrize("carry", [Carry.PAUSE, Carry.RECOMPUTE, Carry.DRAIN])
def test_only_plans_that_move_kv_copy_early(carry: Carry) -> None:
    ranks = Serving()
    ranks.switch(carry=carry)
    assert not ranks.round()


def test_an_operator_may_ask_for_none() -> None:
    ranks = Serving(precopy=False)
    ranks.switch()
    assert not ranks.round()
    assert not ranks.switcher.is_precopying


def test_a_rank_that_copies_is_not_late() -> None:
    ranks = Serving()
    ranks.switch()
    ranks.now_ms += 900
    ranks.report()
    assert ranks.tick() == ()
    assert ranks.switcher.is_precopying
