"""What the policy makes of pipeline groups: their costs, their candidates, whom they are for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from comm_pool.layout import Mode, Rank, format_layout, parse_layout
from comm_pool.mixed import Staged
from coordinator.model.cost_model import CostModel, GroupCost, StepFits, SwitchCost
from coordinator.model.observation import Observation
from coordinator.model.observation_log import CostRecord, cost_record, costs_of, encode
from coordinator.model.observation_log import decode as read_line
from coordinator.model.policy_settings import PolicySettings
from coordinator.model.step_line import StepLine, sums_of
from coordinator.policy.candidates import LayoutSpace
from coordinator.policy.decide import State, Verdict, decide
from coordinator.policy.knowledge import Knowledge
from coordinator.policy.step_file import parse_step_times
from coordinator.protocol.messages.rank import RankHello
from coordinator.protocol.messages.steps import ServedSteps, WidthTimes
from coordinator.protocol.terms import Tier
from coordinator.ranks.roster import Roster, kv_tokens
from coordinator.tasks.placement import max_context_tokens
from tests.harness.coordinator.builders import hello
from tests.harness.coordinator.policy import SETTINGS, observation, tier

WIDTHS = (1, 2)
DP, TP = StepLine(0.020, 1e-4, 1e-8), StepLine(0.030, 2e-4, 5e-9)
"""Ranks with a slow link: what tp2 sums takes longer than what it saves."""
STAGE = StepLine(0.010, 5e-5, 5e-9)
ROUND = StepLine(2 * STAGE.base_s, STAGE.token_s, STAGE.context_s)
CAPACITY = 400_000


def cost(line: StepLine, width: int, stages: int = 1) -> GroupCost:
    return GroupCost(line, line, CAPACITY * width // 2, 256, stages * 2_048, stages=stages)


SLOW_LINK = CostModel(
    {"dp1": cost(DP, 1), "tp2": cost(TP, 2), "pp2": cost(ROUND, 2, 2)},
    SwitchCost(0.05, 100_000, 10e9),
)
TP_OR_PP = CostModel({name: SLOW_LINK.groups[name] for name in ("tp2", "pp2")}, SLOW_LINK.switch)


def points(line: StepLine) -> tuple[tuple[int, int], ...]:
    return tuple((tokens, round(line.seconds(tokens, 0) * 1e6)) for tokens in (1, 256, 2_048))


def staged(rank: int, *widths: int) -> RankHello:
    """A rank that has prepared pipeline groups of these widths."""
    wide = tuple(
        WidthTimes(width, (("tp", points(TP)), *((("pp2", points(STAGE)),) * (width in widths))))
        for width in (2,)
    )
    times = (WidthTimes(1, (("dp", points(DP)),)), *wide)
    return replace(hello(rank, widths=WIDTHS), step_times=times, tokens_per_step_max=2_048)


class Ranks:
    """Two ranks, as the policy knows them."""

    alive = (Rank(0), Rank(1))

    def __init__(self, *hellos: RankHello) -> None:
        self.roster, self.knowledge = Roster(2), Knowledge(WIDTHS, {})
        for each in hellos:
            self.roster.on_hello(each, 0)
            self.knowledge.on_hello(each)

    @property
    def costs(self) -> CostModel:
        return self.knowledge.costs(self.roster, self.alive)

    @property
    def names(self) -> set[str]:
        space = self.knowledge.space(self.roster, self.alive)
        return {format_layout(each) for each in space.layouts(parse_layout("dp2", 2, WIDTHS))}


def test_a_step_of_a_pipeline_group_stands_for_one_of_each_stage() -> None:
    found = Ranks(staged(0, 2), staged(1, 2)).costs.groups["pp2"]
    assert found.stages == 2
    assert found.decode.base_s == pytest.approx(2 * STAGE.base_s, rel=0.01)
    assert found.decode.token_s == pytest.approx(STAGE.token_s, rel=0.01)
    assert found.chunk_tokens == 2 * 2_048
    assert found.capacity_tokens == Ranks(staged(0), staged(1)).costs.groups["tp2"].capacity_tokens


def test_stages_have_more_kv_than_parts_that_share_a_head() -> None:
    ranks = Ranks(*(replace(staged(rank, 2), kv_heads=1) for rank in range(2)))
    groups = ranks.costs.groups
    assert groups["pp2"].capacity_tokens == 2 * groups["tp2"].capacity_tokens
    one = kv_tokens([staged(0)], 1)
    plain = Ranks(*(replace(staged(rank), kv_heads=1) for rank in range(2)))
    assert max_context_tokens(plain.roster, plain.alive) == one
    assert max_context_tokens(ranks.roster, ranks.alive) == 2 * one


def test_served_steps_correct_what_stages_measured() -> None:
    fits = StepFits()
    fits.add_curves(staged(0, 2).step_times)
    slower = [(tokens, 0.0, 2 * STAGE.seconds(tokens, 0)) for tokens in range(1, 256)]
    for _ in range(20):
        fits.add_steps([ServedSteps(Mode.PP, 2, sums_of(slower))])
        fits.add_steps([ServedSteps(Mode.PP, 4, sums_of(slower), stage_tp=2)])
    for name in ("pp2", "pp2tp2"):
        line = fits.line(name)
        assert line is not None
        assert line.seconds(2_048, 0) == pytest.approx(2 * STAGE.seconds(2_048, 0), rel=0.1)
    assert fits.line("pp4") is None


def test_only_ranks_that_have_all_prepared_it_form_a_pipeline_group() -> None:
    assert Ranks(staged(0, 2), staged(1, 2)).names == {"dp2", "tp2", "pp2"}
    assert Ranks(staged(0, 2), staged(1)).names == {"dp2", "tp2"}
    assert Ranks(staged(0), staged(1)).names == {"dp2", "tp2"}


def test_layouts_of_several_pipeline_groups_are_candidates() -> None:
    modes = {1: Mode.DP, 2: Mode.TP, 4: Mode.SHIFT}
    here = parse_layout("dp4", 4, (1, 2, 4))

    def found(*pipelines: Staged) -> set[str]:
        space = LayoutSpace(4, modes, pipelines=pipelines)
        return {format_layout(each) for each in space.layouts(here)}

    plain = {"dp4", "dp2+tp2", "tp2+tp2", "shift4"}
    pairs = {"dp2+pp2", "pp2+pp2"}
    assert found() == plain
    assert found(Staged(2)) == plain | pairs
    assert found(Staged(2), Staged(4)) == plain | pairs | {"pp4"}
    assert found(Staged(2, 2)) == plain | {"pp2tp2"}
    assert found(Staged(2), Staged(2, 2)) == plain | pairs | {"pp2tp2"}


def test_stages_of_several_ranks_are_candidates_with_a_cost_of_their_own() -> None:
    """Four ranks in pairs with a fast link: pp2tp2 is measured, and takes tp2 as its stages."""
    wide = (
        WidthTimes(2, (("tp", points(TP)),)),
        WidthTimes(4, (("tp", points(TP)), ("pp2tp2", points(STAGE)))),
    )
    ready = [
        replace(each, step_times=(*each.step_times[:1], *wide), widths=(1, 2, 4), kv_heads=2)
        for each in (staged(rank) for rank in range(4))
    ]
    roster, knowledge = Roster(4), Knowledge((1, 2, 4), {})
    for each in ready:
        roster.on_hello(each, 0)
        knowledge.on_hello(each)
    alive = [Rank(rank) for rank in range(4)]
    assert knowledge.pipelines(roster, alive) == (Staged(2, 2),)
    found = knowledge.costs(roster, alive).groups
    assert set(found) == {"dp1", "tp2", "tp4", "pp2tp2"}
    assert found["pp2tp2"].stages == 2
    assert found["pp2tp2"].decode.base_s == pytest.approx(2 * STAGE.base_s, rel=0.01)
    assert found["pp2tp2"].capacity_tokens == kv_tokens(ready, 4, 2) == 2 * kv_tokens(ready, 4)
    space = knowledge.space(roster, alive)
    here = parse_layout("dp4", 4, (1, 2, 4))
    assert "pp2tp2" in {format_layout(each) for each in space.layouts(here)}


@given(
    prompt=st.integers(1, 60_000),
    chunk=st.sampled_from([256, 2_048, 8_192]),
    stages=st.sampled_from([1, 2, 4]),
)
def test_a_prompt_passes_the_stages_one_chunk_after_the_other(
    prompt: int, chunk: int, stages: int
) -> None:
    line = StepLine(stages * STAGE.base_s, STAGE.token_s, 0.0)
    group = GroupCost(line, line, CAPACITY, 256, stages * chunk, stages=stages)
    chunks = [chunk] * (prompt // chunk) + [prompt % chunk] * (prompt % chunk > 0)
    ends_s = [0.0] * stages
    for tokens in chunks:
        ready_s = 0.0
        for stage in range(stages):
            ready_s = ends_s[stage] = max(ready_s, ends_s[stage]) + STAGE.seconds(tokens, 0)
    # The last chunk may be shorter than those before it, which the estimate passes over.
    shorter_s = STAGE.token_s * (chunks[0] - chunks[-1]) * (stages - 1)
    assert group.first_s(prompt) == pytest.approx(ends_s[-1], rel=1e-6, abs=shorter_s + 1e-9)


def choose(seen: Observation, costs: CostModel, settings: PolicySettings = SETTINGS) -> Verdict:
    space = LayoutSpace(2, {1: Mode.DP, 2: Mode.TP}, pipelines=(Staged(2),))
    current = parse_layout(seen.layout, 2, WIDTHS)
    return decide(seen, current, space, costs, settings, State())[0]


def test_batch_work_behind_a_slow_link_goes_to_stages() -> None:
    batch = tier(
        *(Tier.BATCH,), unstarted=200, unstarted_tokens=600_000, rate=2.0, prompts=(3_000,)
    )
    found = choose(observation("tp2", batch), TP_OR_PP)
    assert format_layout(found.choice.layout) == "pp2"
    by_name = {each.arrangement.name: each.score for each in found.candidates}
    assert by_name["pp2"].use < by_name["tp2"].use


def test_interactive_tasks_that_would_miss_their_goal_per_token_keep_stages_away() -> None:
    batch = tier(Tier.BATCH, unstarted=200, unstarted_tokens=600_000, rate=2.0, prompts=(3_000,))
    urgent = tier(Tier.INTERACTIVE, rate=1.0, running=3, context_tokens=3_000, prompts=(200,))
    found = choose(observation("tp2", urgent, batch), TP_OR_PP)
    (stages,) = (each for each in found.candidates if each.arrangement.name == "pp2")
    assert "from pipeline stages, and their goal is 30 ms" in stages.score.refused
    assert format_layout(found.choice.layout) != "pp2"


def test_stages_serve_interactive_tasks_that_meet_their_goals() -> None:
    urgent = tier(Tier.INTERACTIVE, rate=0.2, prompts=(200,))
    found = choose(observation("tp2", urgent), TP_OR_PP)
    (stages,) = (each for each in found.candidates if each.arrangement.name == "pp2")
    assert not stages.score.refused, "a round of two stages takes 20 ms"


def test_a_log_has_the_pipeline_groups() -> None:
    pipelines = Staged(2), Staged(2, 2)
    record = read_line(encode(cost_record(0, 2, {1: Mode.DP}, SLOW_LINK, SETTINGS, pipelines)))
    assert isinstance(record, CostRecord)
    assert record.pipelines == ("pp2", "pp2tp2")
    assert costs_of(record).groups["pp2"].stages == 2


def test_step_times_of_a_stage_may_be_given() -> None:
    found = parse_step_times({"pp2": {"points": [[1, 10.0], [2_048, 112.0]]}})
    assert found["pp2"].base_s == pytest.approx(0.01, rel=0.05)
