"""Tasks go to the group that has read the beginning of their prompt, unless it is much busier."""

from comm_pool.layout import Group, Mode, Rank
from coordinator.model.events import ToRank
from coordinator.protocol.messages.tasks import Adopted
from coordinator.protocol.prefixes import BLOCK_TOKENS
from coordinator.protocol.terms import Binding, TaskId
from coordinator.tasks.placement import KNOWN_TOKEN_WORTH, OpenGroup
from coordinator.tasks.prefix_affinity import PrefixAffinity
from coordinator.tasks.task_pool import TaskPool
from tests.harness.coordinator.builders import submit
from tests.harness.coordinator.pools import LIMITS, ended

AGENT, OTHER = tuple(range(10, 16)), tuple(range(20, 26))
KNOWN_TOKENS = len(AGENT) * BLOCK_TOKENS


def bound(*ranks: int, formation: int = 1) -> Binding:
    members = tuple(map(Rank, ranks))
    return Binding(Group(members, Mode.DP if len(members) == 1 else Mode.TP), formation)


def opened(*ranks: int, formation: int = 1) -> OpenGroup:
    return OpenGroup(bound(*ranks, formation=formation), 1_000, 100_000, 16)


class Cell:
    """A pool and the groups that it places into; tasks stay until they are ended."""

    def __init__(self, *groups: OpenGroup) -> None:
        self.pool = TaskPool(LIMITS)
        self.pool.recovering = False
        self.groups = groups
        self._tasks = 0

    def send(self, prefixes: tuple[int, ...], prompt: int = 400) -> int:
        """Place one more task; the leader that gets it."""
        self._tasks += 1
        name = str(self._tasks)
        self.pool.submit(submit(name, prompt=prompt, prefixes=prefixes), 0)
        (effect,) = self.pool.place(self.groups, 0)
        assert isinstance(effect, ToRank)
        return effect.rank

    def say_cached(self, leader: int, prefixes: tuple[int, ...]) -> None:
        """A move has brought these blocks to a rank."""
        self.pool.tasks.loads.homes.cached(Rank(leader), prefixes)

    def finish(self) -> None:
        """End all tasks."""
        for task in list(self.pool.tasks):
            assert task.leader is not None
            self.pool.ended(task.leader, ended(task.id, task.attempt))


def test_a_task_goes_where_its_prompt_was_read() -> None:
    cell = Cell(opened(0), opened(1), opened(2))
    assert [cell.send(AGENT), cell.send(OTHER), cell.send(())] == [0, 1, 2]
    assert [cell.send(OTHER), cell.send(AGENT)] == [1, 0]
    cell.finish()
    assert [cell.send(OTHER), cell.send(AGENT), cell.send(())] == [1, 0, 2]


def test_a_prompt_that_many_share_is_read_by_others_before_a_group_is_overloaded() -> None:
    cell = Cell(opened(0), opened(1))
    leaders = [cell.send(AGENT) for _ in range(20)]
    lead = max(
        abs(leaders[:sent].count(0) - leaders[:sent].count(1)) for sent in range(1, len(leaders))
    )
    assert leaders[:3] == [0, 0, 0]
    assert 1 <= lead - 1 <= KNOWN_TOKEN_WORTH * KNOWN_TOKENS / 400
    assert leaders.count(1) >= 8


def test_a_group_knows_what_a_move_has_brought_to_its_leader() -> None:
    cell = Cell(opened(0), opened(1), opened(2))
    assert [cell.send(AGENT), cell.send(OTHER)] == [0, 1]
    cell.finish()
    cell.say_cached(0, (*AGENT, *OTHER))
    cell.groups = (opened(0, 1, formation=2), opened(2))
    assert [cell.send(AGENT), cell.send(OTHER)] == [0, 0]
    cell.finish()
    cell.say_cached(1, AGENT)
    cell.groups = (opened(0, formation=3), opened(1, formation=3), opened(2))
    assert [cell.send(AGENT), cell.send(OTHER), cell.send(OTHER)] == [1, 0, 0]


def test_a_task_that_moves_takes_its_prompt_along() -> None:
    cell = Cell(opened(0), opened(1))
    assert cell.send(AGENT) == 0
    cell.pool.adopted(Rank(1), Adopted(TaskId("1"), 2, 0), 0)
    cell.groups = (opened(0, formation=2), opened(1, formation=2))
    assert cell.send(AGENT) == 1


def test_only_the_blocks_up_to_the_first_unknown_one_count() -> None:
    homes = PrefixAffinity()
    homes.remember(bound(0), AGENT)
    assert homes.matched_tokens(bound(0), AGENT) == KNOWN_TOKENS
    assert homes.matched_tokens(bound(0), (*AGENT[:2], 99, *AGENT[3:])) == 2 * BLOCK_TOKENS
    assert homes.matched_tokens(bound(0), (99, *AGENT)) == 0
    assert homes.matched_tokens(bound(1), AGENT) == 0


def test_what_a_group_knows_ends_with_it() -> None:
    homes = PrefixAffinity()
    for formation in range(1, 20):
        groups = ((0, 1), (2, 3)) if formation % 2 else ((0,), (1,), (2,), (3,))
        for ranks in groups:
            assert not homes.matched_tokens(bound(*ranks, formation=formation), AGENT)
            homes.remember(bound(*ranks, formation=formation), AGENT)
        assert len(homes) == len(groups)


def test_a_new_process_that_inherits_blocks_has_the_history_of_the_one_before() -> None:
    homes = PrefixAffinity()
    homes.remember(bound(1), AGENT)
    homes.inherit(Rank(1))
    assert homes.matched_tokens(bound(1, formation=2), AGENT) == KNOWN_TOKENS
    homes.remember(bound(0, 1, formation=3), OTHER)
    homes.inherit(Rank(0))
    assert not homes.matched_tokens(bound(0, formation=4), OTHER), "a group shared these blocks"


def test_a_wide_group_has_nothing_that_its_leader_inherits() -> None:
    homes = PrefixAffinity()
    homes.remember(bound(0), AGENT)
    homes.inherit(Rank(0))
    assert not homes.matched_tokens(bound(0, 1, formation=2), AGENT)
    assert not homes.matched_tokens(bound(0, formation=3), AGENT), "its pages have changed since"
