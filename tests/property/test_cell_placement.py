"""Which cell gets a task, for any cells: never one that cannot have it, else the idlest."""

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from coordinator.protocol.messages.gateway import CellLoad
from coordinator.protocol.terms import TaskId, Tier
from gateway.fleet.placement import (
    AFFINITY_LOAD_MAX,
    LOAD_STEP,
    Candidate,
    Needs,
    can_hold,
    choose,
    load_for,
    spill,
)

loads = st.builds(
    CellLoad,
    queued=st.tuples(*[st.integers(0, 20)] * 3),
    running=st.integers(0, 64),
    tasks_max=st.sampled_from([0, 8, 32, 64]),
    blocks_free=st.integers(0, 100),
    blocks_total=st.just(100),
)
candidates = st.builds(
    Candidate,
    name=st.sampled_from("abcdefgh"),
    is_up=st.booleans(),
    is_draining=st.booleans(),
    is_serving=st.booleans(),
    ranks_alive=st.integers(0, 2),
    context_tokens_max=st.sampled_from([0, 512, 4_096]),
    load=loads,
    sent=st.integers(0, 20),
    matched_blocks=st.integers(0, 8),
)
fleets = st.lists(candidates, max_size=8, unique_by=lambda cell: cell.name)
needs = st.builds(
    Needs,
    task=st.text(max_size=4).map(TaskId),
    tier=st.sampled_from(Tier),
    context_tokens_max=st.integers(1, 5_000),
)


@given(needs, fleets)
def test_only_cells_that_can_have_a_task_get_it(needs: Needs, cells: list[Candidate]) -> None:
    name = choose(needs, cells)
    fit = {cell.name: cell for cell in cells if can_hold(cell, needs)}
    assert (name is None) == (not fit)
    if name is not None:
        chosen = fit[name]
        assert chosen.is_up
        assert chosen.ranks_alive
        assert not chosen.is_draining
        assert chosen.context_tokens_max in (0, *range(needs.context_tokens_max, 5_000))
        assert chosen.is_serving or not any(cell.is_serving for cell in fit.values())


@given(needs, fleets)
def test_without_affinity_the_idlest_cell_gets_it(needs: Needs, cells: list[Candidate]) -> None:
    cells = [replace(cell, matched_blocks=0, is_serving=True) for cell in cells]
    name = choose(needs, cells)
    fit = {cell.name: load_for(cell, needs.tier) for cell in cells if can_hold(cell, needs)}
    assert name is None or fit[name] < min(fit.values()) + LOAD_STEP


@given(needs, fleets)
def test_affinity_wins_while_the_load_differs_little(needs: Needs, cells: list[Candidate]) -> None:
    cells = [replace(cell, is_serving=True) for cell in cells]
    name = choose(needs, cells)
    assume(name is not None)
    fit = {cell.name: cell for cell in cells if can_hold(cell, needs)}
    load = {each: load_for(cell, needs.tier) for each, cell in fit.items()}
    chosen = fit[name or ""]
    near = [fit[each] for each in fit if load[each] <= min(load.values()) + AFFINITY_LOAD_MAX]
    best = max(cell.matched_blocks for cell in near)
    # Whoever knows most of the prompt among those that are not much busier, and nobody else.
    if best:
        assert chosen.matched_blocks == best
    else:
        assert load[chosen.name] < min(load.values()) + LOAD_STEP
    assert load[chosen.name] <= min(load.values()) + max(AFFINITY_LOAD_MAX, LOAD_STEP)


@given(needs, fleets)
def test_the_order_of_cells_does_not_matter(needs: Needs, cells: list[Candidate]) -> None:
    assert choose(needs, cells) == choose(needs, cells[::-1])


def test_equal_cells_share_tasks() -> None:
    cell = Candidate("a", True, False, True, 2, 0, CellLoad((0, 0, 0), 0, 8, 1, 1))
    cells = [cell, replace(cell, name="b"), replace(cell, name="c")]
    names = [choose(Needs(TaskId(f"task-{each}"), Tier.STANDARD, 1), cells) for each in range(200)]
    assert min(names.count(each) for each in "abc") > 20


@given(fleets)
def test_queues_flow_from_cells_that_have_one_to_idle_ones(cells: list[Candidate]) -> None:
    known = {cell.name: cell for cell in cells}
    given_up = dict.fromkeys(known, 0)
    idle_seen = set()
    for each in spill(cells):
        busy, idle = known[each.busy], known[each.idle]
        given_up[each.busy] += each.tasks
        assert each.tasks > 0
        assert busy.is_up
        assert idle.is_up
        assert idle.is_serving
        assert not idle.is_draining
        assert not sum(idle.load.queued)
        room = idle.load.tasks_max - idle.load.running - idle.sent
        assert each.tasks <= -(-room // 2)
        assert each.idle not in idle_seen
        idle_seen.add(each.idle)
    assert all(given_up[name] <= sum(cell.load.queued) for name, cell in known.items())
