"""Steps of a pipeline group: several are in flight, and none is when its members leave."""

import pytest

pytest.importorskip("vllm")

from comm_pool.cpu.step_ring import SLOTS
from comm_pool.formations import PeerLostError
from comm_pool.layout import Rank
from comm_pool.mixed import Staged
from coordinator.protocol.terms import Binding, Carry, Phase, ReturnCause, TaskId
from tests.harness.worker.core_cell import CoreCell, drop, kinds
from tests.harness.worker.fake_engine import FakeCell
from tests.harness.worker.fake_rank import FakeRank, binding_of
from tests.harness.worker.fake_scheduler import FakePlan, FakeScheduler, token_at
from worker.engine.runners.gpu_stage import AHEAD_STEPS_MAX
from worker.engine.runners.stage_link import PIECES
from worker.io.step_queue import LeaveGroup, QueueMessage, Step
from worker.rank.step_log import StepLog
from worker.rank.steps import PLANNED_MAX

PIPELINES = (Staged(2, 1), Staged(4, 1))
PAIR = binding_of(0, 2, 4, stages=2)


class Group:
    """A pipeline group whose leader steps; followers read their queues when a test lets them."""

    def __init__(
        self, binding: Binding = PAIR, budget: int = 96, *, on_device: bool = False
    ) -> None:
        ranks = binding.group.ranks
        cell = FakeCell(len(ranks), budget=budget, pipelines=PIPELINES)
        self.binding = binding
        self.streams: dict[str, list[int]] = {}
        self.members = [FakeRank(cell, rank, self.streams) for rank in ranks]
        for each in self.members:
            each.engine.is_synchronous = not on_device
        self.leader, *self.followers = self.members
        for each in self.followers:
            each.runtime.join(binding)
        self.leader.serve(binding)
        for each in self.followers:
            each.runtime.follow(binding, wait_s=0.0)

    @property
    def scheduler(self) -> FakeScheduler:
        """The leader's."""
        scheduler = self.leader.runtime.mode_of(self.binding.group).scheduler
        assert isinstance(scheduler, FakeScheduler)
        return scheduler

    def place(self, *names: str, tokens: int = 3) -> None:
        """Give the leader tasks with prompts of their own."""
        for number, name in enumerate(names):
            self.leader.place(name, self.binding, prompt=self.prompt(number), tokens=tokens)

    @staticmethod
    def prompt(number: int) -> range:
        """The prompt of a task, by its number."""
        return range(50 * number, 50 * number + 10)

    def sent(self) -> list[FakePlan]:
        """Return, once, the steps that the first follower has not read."""
        queue = self.followers[0].runtime.mode_of(self.binding.group).queue
        found: list[FakePlan] = []
        while True:
            try:
                message = queue.dequeue()
            except TimeoutError:
                return found
            assert isinstance(message, Step)
            found.append(message.plan)

    def follow(self) -> None:
        """Let followers compute all that they were sent."""
        for each in self.followers:
            while each.runtime.follow(self.binding, wait_s=0.0) is not None:
                pass

    @property
    def tasks_in_flight(self) -> list[list[str]]:
        """The tasks of each planned step, oldest first."""
        planned = self.leader.runtime.steps._planned
        return [[part.name for part in each.plan.parts] for each in planned]


def test_stages_have_a_step_each_and_the_leader_computes_the_oldest() -> None:
    group = Group(binding_of(0, 4, 4, stages=4), budget=10)
    group.place("a", "b", "c", "d", "e")
    group.leader.step()
    assert group.tasks_in_flight == [["b"], ["c"], ["d"]], "of 4 steps one is over"
    assert [group.streams.get(name) is not None for name in "abcde"] == [True] + [False] * 4
    group.leader.step()
    # a decodes again, and leaves room for most of e's prompt.
    assert group.tasks_in_flight == [["c"], ["d"], ["a", "e"]]
    assert [len(each.parts) for each in group.sent()] == [1, 1, 1, 1, 2]


def test_a_device_is_given_all_steps_at_once() -> None:
    """It waits for the stage before, so the leader has to wait for tokens alone."""
    group = Group(PAIR, budget=10, on_device=True)
    group.place("a", "b", "c", "d")
    group.leader.step()
    engine, mode = group.leader.engine, group.leader.engine.of_width(2, 2)
    # a decodes before the leader has its first token.
    assert group.tasks_in_flight == [["a", "b"], ["b", "c"]], "one more than there are stages"
    assert (mode.computed, len(engine.launched)) == (1, 2)
    assert [group.streams.get(name) is not None for name in "abcd"] == [True] + [False] * 3
    group.leader.step()
    assert group.leader.runtime.steps.count == 4, "each counts once"
    group.leader.runtime.steps.finish_inflight()
    assert (mode.computed, len(engine.launched)) == (4, 0)


def test_a_device_computes_a_task_alone_step_after_step() -> None:
    group = Group(PAIR, budget=10, on_device=True)
    group.place("a", tokens=9)
    group.leader.step()
    for _ in range(6):
        assert group.tasks_in_flight == [["a"]]
        group.leader.step()
    group.leader.step()
    group.leader.step()
    assert not group.leader.runtime.steps.has_planned
    assert group.streams["a"] == [token_at(group.prompt(0), 10 + each) for each in range(9)]


@pytest.mark.parametrize("on_device", [False, True])
def test_tokens_come_out_in_the_order_of_the_steps(*, on_device: bool) -> None:
    group = Group(budget=10, on_device=on_device)
    names = ("a", "b", "c")
    group.place(*names)
    while group.leader.runtime.has_work:
        group.leader.step()
        group.follow()
    firsts = [name for _, tasks in group.leader.pushed for name in tasks]
    assert sorted(set(firsts), key=firsts.index) == ["a", "b", "c"]
    for number, name in enumerate(names):
        prompt = group.prompt(number)
        assert group.streams[name] == [token_at(prompt, 10 + each) for each in range(3)]
    assert [len(each.runtime.book) for each in group.members] == [0, 0]
    for each in group.followers:
        each.engine.finish_steps()
    computed = {each.engine.of_width(2, 2).computed for each in group.members}
    assert len(computed) == 1, "every stage computes every step"


def test_a_task_is_in_one_step_until_its_token_is_there() -> None:
    group = Group()
    group.place("a")
    for _ in range(3):
        group.leader.step()
        assert group.tasks_in_flight == []
    assert len(group.streams["a"]) == 3
    assert [each.tokens for each in group.sent()] == [10, 1, 1]


def test_nothing_is_sent_where_every_task_waits_for_its_token() -> None:
    group = Group()
    group.place("a", tokens=9)
    group.leader.step()
    group.leader.step()
    numbers = [each.number for each in group.sent()]
    assert numbers == [1, 2], "no void step lies between them"


def test_the_log_hears_how_many_stages_had_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(binding_of(0, 4, 4, stages=4), budget=10)
    steps = group.leader.runtime.steps
    heard: list[float] = []
    monkeypatch.setattr(StepLog, "ended", lambda *_, busy: heard.append(busy))
    group.place("a")
    group.leader.step()
    assert heard == [0.25]
    group.place("b", "c", "d", "e")
    group.leader.step()
    assert heard == [0.25, 1.0]
    steps.finish_inflight()
    assert heard[2:] == [0.0, 0.0, 0.0], "a pipeline that drains says little"


def test_all_steps_are_finished_before_a_task_is_dropped() -> None:
    group = Group(budget=10)
    group.place("a", "b", tokens=9)
    group.leader.step()
    assert group.tasks_in_flight == [["b"]]
    group.leader.runtime.drop(TaskId("b"), 1)
    assert group.tasks_in_flight == []
    assert len(group.streams["b"]) == 1, "its first token is sent, and then it ends"
    assert [each.task for each in group.leader.runtime.ended] == ["b"]
    group.leader.step()
    assert [each.ended for each in group.sent()][-1] == {"b"}


def test_steps_of_an_aborted_formation_are_dropped_and_count_for_nobody() -> None:
    group = Group(budget=10)
    group.place("a", "b", "c", tokens=9)
    group.leader.step()
    steps = group.leader.runtime.steps
    group.leader.engine.communicators.abort(group.binding.group.ranks, 4)
    with pytest.raises(PeerLostError):
        steps.finish_inflight()
    group.leader.runtime.forget_steps(group.binding)
    assert not steps.has_inflight and not steps.has_planned
    assert sorted(group.streams) == ["a"]
    used = group.scheduler.blocks_total - group.scheduler.blocks_free
    group.leader.runtime.give_up(group.binding.group, ["a", "b", "c"], ReturnCause.RECOMPUTE)
    assert used == 2 and group.scheduler.blocks_free == group.scheduler.blocks_total
    returned = {each.task: len(each.generated_tokens) for each in group.leader.runtime.returned}
    assert returned == {"a": 1, "b": 0, "c": 0}


def test_steps_that_are_forgotten_are_never_computed() -> None:
    group = Group(budget=10)
    group.place("a", "b", tokens=9)
    group.leader.step()
    mode = group.leader.engine.of_width(2, 2)
    computed = mode.computed
    group.leader.runtime.forget_steps(group.binding)
    assert not group.leader.runtime.steps.has_planned
    group.leader.runtime.steps.finish_inflight()
    assert mode.computed == computed
    assert mode.known == set(), "nor does the runner know of their tasks"


# ------------------------------------------------------------------ with all that a rank decides


def cell_of(layout: str, world: int = 2) -> CoreCell:
    return CoreCell(layout, world, pipelines=PIPELINES)


def fill(cell: CoreCell, tasks: int) -> None:
    """Give a group more prompts than fit into one step."""
    for number in range(tasks):
        cell.place_task(f"t{number}", prompt=range(40 * number, 40 * number + 40))


def test_a_leader_leaves_only_after_all_its_steps_are_finished() -> None:
    cell = cell_of("pp2")
    fill(cell, 6)
    leader = cell.ranks[0]
    leader.turn()
    assert leader.runtime.steps.has_planned
    cell.retarget("dp2")
    leader.hear(cell.wanted(Phase.PARK, Carry.RESHARD))
    asked = kinds(leader.turn())
    assert asked[: asked.index("Leave") + 1] == ["FinishStep", "Leave"]
    assert "DeferStep" not in asked
    assert not leader.runtime.steps.has_inflight
    messages = leader.engine.cell.engines[Rank(1)].of_width(2, 2).queue
    sent: list[QueueMessage] = []
    while not sent or not isinstance(sent[-1], LeaveGroup):
        sent.append(messages.dequeue())
    assert [type(each) for each in sent[:-1]] == [Step] * (len(sent) - 1), "all before the leave"


def test_a_command_finishes_all_steps_first() -> None:
    cell = cell_of("pp2")
    fill(cell, 6)
    leader = cell.ranks[0]
    leader.turn()
    assert leader.runtime.steps.has_planned
    parts = leader.runtime.steps._planned[-1].plan.parts
    last = next(each.name for each in parts if each.gives)
    assert last not in cell.streams
    leader.hear(drop(last))
    leader.turn()
    assert len(cell.streams[last]) == 1, "the step that it was in is finished"
    assert leader.runtime.book.get(TaskId(last)) is None


def test_a_command_is_obeyed_though_the_steps_before_it_are_void() -> None:
    """It concerns a task that is paused in another group, which nobody returns."""
    cell = cell_of("tp2")
    cell.place_task("paused")
    cell.turn(2)
    cell.retarget("pp2")
    for phase in (Phase.PARK, Phase.SWAP, Phase.SERVE):
        cell.ask(cell.wanted(phase, Carry.PAUSE))
    fill(cell, 6)
    leader = cell.ranks[0]
    leader.turn()
    assert leader.runtime.steps.has_planned
    binding = cell.target.bindings[0]
    leader.engine.communicators.abort(binding.group.ranks, binding.formation)
    leader.hear(drop("paused"))
    leader.turn()
    assert leader.runtime.book.get(TaskId("paused")) is None
    assert "paused" in {each.task for report in leader.reports for each in report.ended}


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, ("pp2", "tp2", "pp2", "dp2", "pp2")),
        (4, ("dp4", "pp4", "tp4", "pp2+tp2", "pp4")),
        (4, ("tp4", "pp2+pp2", "tp2+pp2", "dp2+pp2", "tp4")),
    ],
    ids=str,
)
def test_streams_go_on_between_pipeline_and_other_groups(
    world: int, layouts: tuple[str, ...]
) -> None:
    cell = cell_of(layouts[0], world)
    for group in range(len(cell.target.bindings)):
        for number in range(2 if world == 2 else 1):
            name = f"t{group}.{number}"
            cell.place_task(name, group, range(90 * group + 40 * number, 90 * group + 80))
    for layout in layouts[1:]:
        cell.turn(4)
        cell.move(layout)
    for _ in range(60):
        cell.turn()
    for name, prompt in cell.prompts.items():
        assert cell.streams[name] == [token_at(prompt, len(prompt) + at) for at in range(30)], name
    assert not any(each.returned for each in cell.ranks), "no task was computed again"
    counts = [each.engine.pages.counts() for each in cell.ranks]
    assert all(each.free + each.owned + sum(each.leased.values()) == 64 for each in counts)


@pytest.mark.parametrize("carry", [Carry.PAUSE, Carry.RECOMPUTE])
def test_a_paused_pipeline_group_has_a_lease_of_its_own(carry: Carry) -> None:
    """Its tasks wait in it while tp2 of the same ranks serves, in other pages."""
    cell = cell_of("pp2")
    cell.place_task("a")
    cell.turn(4)
    key = cell.target.bindings[0].group.lease_key
    cell.retarget("tp2")
    for phase in (Phase.PARK, Phase.SWAP, Phase.SERVE):
        cell.ask(cell.wanted(phase, carry))
    other = cell.target.bindings[0].group.lease_key
    for each in cell.ranks:
        leased = each.engine.pages.counts().leased
        assert (leased.get(key, 0) > 0) == (carry is Carry.PAUSE)
        assert leased[other] > 0


def test_the_steps_of_all_stages_leave_room_in_the_step_queue() -> None:
    """For a grant, or the leave message: a leader that waits for room waits for its followers."""
    assert PLANNED_MAX + 2 <= SLOTS


def test_the_link_of_tokens_has_room_for_all_steps_in_flight() -> None:
    """The first stage never waits for a message of a step that may be in flight but needs not."""
    assert PLANNED_MAX <= AHEAD_STEPS_MAX < PIECES
