"""Curves of measured step times, and the number of tokens from which sp is chosen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_pool.layout import Mode, StepMode
from comm_pool.mixed import Staged
from worker.rank.step_times import (
    PACE,
    StepCurve,
    StepTimes,
    chosen_parts,
    crossing,
    fitted,
    pace_tokens,
    sizes_to_measure,
    width_times,
)


def test_a_curve_is_straight_between_and_beyond_its_points() -> None:
    curve = StepCurve(((1, 100), (11, 200), (21, 400)))
    assert [curve.us(tokens) for tokens in (0, 1, 6, 11, 16, 21, 26)] == [
        *(100, 100, 150, 200, 300, 400, 500)
    ]
    assert StepCurve(((8, 70),)).us(1000) == 70


def test_a_fit_pools_what_falls() -> None:
    curve = fitted({64: 5e-5, 1: 1e-4, 4: 9e-5, 256: 3e-4})
    assert curve.points == ((1, 80), (4, 80), (64, 80), (256, 300))


@given(st.dictionaries(st.integers(1, 9000), st.floats(1e-5, 1.0), min_size=1))
def test_a_fit_never_falls_and_keeps_the_sizes(medians: dict[int, float]) -> None:
    curve = fitted(medians)
    assert [tokens for tokens, _ in curve.points] == sorted(medians)
    times = [us for _, us in curve.points]
    assert times == sorted(times)


def test_sp_is_chosen_from_where_it_overtakes() -> None:
    # tp: 1000 + 10 per token; sp: 2000 + 5 per token. Equal at 200, 2 % faster from about 214.
    tp = StepCurve(((1, 1010), (1001, 11010)))
    sp = StepCurve(((1, 2005), (1001, 7005)))
    found = crossing(tp, sp)
    assert found is not None
    assert 200 < found < 220
    assert sp.us(found) < tp.us(found)
    assert sp.us(found - 1) >= tp.us(found - 1) * 0.98


def test_against_graphs_sp_has_to_win_clearly() -> None:
    tp = StepCurve(((1, 1_000), (1024, 10_000), (2048, 20_000), (4096, 40_000)))
    little = StepCurve(((1, 2_000), (1024, 9_000), (2048, 18_000), (4096, 36_000)))
    much = StepCurve(((1, 2_000), (1024, 6_000), (2048, 12_000), (4096, 24_000)))
    assert (crossing(tp, little) or 9_999) <= 1024
    assert crossing(tp, little, graphed_tokens=1024) == 1025
    assert (crossing(tp, much, graphed_tokens=1024) or 9_999) < 1024
    modes: dict[StepMode, StepCurve] = {Mode.TP: tp, Mode.SP: little}
    assert StepTimes(2, modes, 1024).sp_from_tokens == 1025


@pytest.mark.parametrize(
    ("sp", "wanted"),
    [
        (((1, 500), (64, 900), (256, 3000)), 1),
        (((1, 900), (64, 1100), (256, 4000)), None),
        (((1, 990), (64, 1000), (256, 4000)), None),
        # Faster for one token, slower for 64, faster for 256: the first is taken for noise.
        (((1, 500), (64, 1200), (256, 3000)), 102),
    ],
)
def test_crossings(sp: tuple[tuple[int, int], ...], wanted: int | None) -> None:
    tp = StepCurve(((1, 1000), (64, 1000), (256, 4000)))
    assert crossing(tp, StepCurve(sp)) == wanted


curves = st.lists(st.integers(1, 10**6), min_size=4, max_size=4).map(
    lambda times: StepCurve(tuple(zip((1, 16, 256, 4096), sorted(times), strict=True)))
)


@given(curves, curves, st.integers(1, 4096))
def test_from_the_crossing_on_sp_is_never_slower(tp: StepCurve, sp: StepCurve, tokens: int) -> None:
    found = crossing(tp, sp)
    if found is None:
        assert sp.us(4096) >= tp.us(4096) * 0.97
    elif tokens >= found:
        assert sp.us(tokens) <= tp.us(tokens)


def test_a_width_without_sp_never_chooses_it() -> None:
    curve = StepCurve(((1, 10), (64, 20)))
    assert StepTimes(2, {Mode.TP: curve}).sp_from_tokens is None
    faster = StepCurve(((1, 5), (64, 6)))
    assert StepTimes(2, {Mode.TP: curve, Mode.SP: faster}).sp_from_tokens == 1


def test_sizes_reach_from_one_token_to_the_largest_step() -> None:
    assert sizes_to_measure(2048, (Mode.TP, Mode.SP)) == (1, 4, 16, 64, 256, 1024, 2048)
    assert sizes_to_measure(64, (Mode.TP, Mode.SP)) == (1, 4, 16, 64)
    assert sizes_to_measure(2048, (Mode.DP,)) == (1, 256, 2048)
    assert sizes_to_measure(512, (Mode.DP,)) == (1, 512)
    assert sizes_to_measure(2048, (Mode.DP,), all_sizes=True) == (1, 4, 16, 64, 256, 1024, 2048)


def test_floors_are_reported_for_the_modes_that_have_one() -> None:
    curve = StepCurve(((1, 100),))
    modes: dict[StepMode, StepCurve] = {Mode.TP: curve, Mode.SP: curve}
    times = StepTimes(2, modes, floor_us={Mode.TP: 0, Mode.SP: 75_600})
    assert width_times(times).floor_us == (("sp", 75_600),)
    assert width_times(StepTimes(2, modes)).floor_us == ()


def test_an_exchange_falls_into_as_few_parts_as_are_about_the_fastest() -> None:
    sizes, parts = (2_048, 4_096, 8_192), (1, 2, 4)
    seconds = [[0.100, 0.110, 0.120], [0.200, 0.197, 0.190], [0.400, 0.300, 0.297]]
    assert chosen_parts(sizes, parts, seconds) == ((2_048, 1), (4_096, 4), (8_192, 2))


def test_what_is_chosen_does_not_depend_on_the_order_in_which_parts_are_named() -> None:
    assert chosen_parts((4_096,), (4, 1, 2), [[0.1, 0.1, 0.1]]) == ((4_096, 1),)
    assert chosen_parts((), (1, 2), []) == ()


def line(floor_us: int, us_per_token: float, *sizes: int) -> list[tuple[int, int]]:
    """Steps that hide their loans as soon as they compute for longer."""
    return [(each, max(floor_us, round(us_per_token * each))) for each in sizes]


@pytest.mark.parametrize("floor_us", [15_000, 69_000, 132_000])
@pytest.mark.parametrize("us_per_token", [20.0, 90.5, 180.0])
def test_the_pace_is_where_the_computation_takes_as_long_as_the_loans(
    floor_us: int, us_per_token: float
) -> None:
    points = line(floor_us, us_per_token, 1, 4, 16, 64, 256, 1024, 2048, 4096, 8192)
    pace = pace_tokens(points, floor_us)
    assert pace == pytest.approx(PACE * floor_us / us_per_token, rel=0.01)


def test_noise_at_the_floor_does_not_count() -> None:
    points = [(1, 68_900), (16, 74_000), (64, 74_000), (256, 74_100), (1024, 93_400)]
    more = [(2048, 183_000), (8192, 716_000)]
    assert pace_tokens([*points, *more], 68_700) == pytest.approx(PACE * 742, abs=3)
    # A line through the origin, where only one step is above the floor.
    assert pace_tokens(points, 68_700) == pytest.approx(PACE * 753, abs=3)


def test_nothing_is_paced_where_loans_do_not_hide() -> None:
    assert pace_tokens(line(0, 90.0, 1, 1024), 0) is None
    # Even a step of one token computes for longer than its loans take.
    assert pace_tokens([(1, 90), (64, 100), (512, 900)], 50) is None
    # Loans and computation take turns.
    assert pace_tokens([(n, 10_000 + 90 * n) for n in (1, 4, 16, 64, 256, 512)], 10_000) is None
    # All steps end with their loans.
    assert pace_tokens(line(69_000, 1.0, 1, 64, 512), 69_000) is None
    # The clock went wild.
    assert pace_tokens([(1, 50), (2, 100), (4, 100)], 50) is None


def test_the_pace_is_the_size_of_a_graph_where_steps_replay_one() -> None:
    points = line(69_000, 105.0, 1, 64, 256, 1024, 2048, 8192)
    sizes = (32, 64, 128, 256, 384, 512, 768, 1024)
    assert pace_tokens(points, 69_000) == int(PACE * 69_000 / 105)
    assert pace_tokens(points, 69_000, sizes) == 1024
    assert pace_tokens(points, 69_000, sizes[:-1]) == int(PACE * 69_000 / 105)
    assert pace_tokens(line(15_000, 105.0, 1, 64, 256, 1024, 2048), 15_000, sizes) == 256


def test_times_of_a_pipeline_group_come_beside_those_of_tp() -> None:
    fast, slow = StepCurve(((1, 10), (64, 20))), StepCurve(((1, 30), (64, 90)))
    of_tp = StepTimes(
        4, {Mode.TP: slow, Mode.SP: fast}, 16, {Mode.SP: 5}, pace_tokens={Mode.SP: 99}
    )
    of_pp = StepTimes(4, {Staged(4): fast})
    both = of_tp.plus(of_pp)
    assert dict(both.curves) == {Mode.TP: slow, Mode.SP: fast, Staged(4): fast}
    assert both.names == ("tp4", "sp4", "pp4")
    assert (both.width, both.graphed_tokens) == (4, 16)
    assert (both.floor_us, both.pace_tokens) == ({Mode.SP: 5}, {Mode.SP: 99})
    assert both.sp_from_tokens == of_tp.sp_from_tokens
    assert both.mixed == (), "a pipeline group is no mode that a shift group could choose"
    assert width_times(both).curves == (
        ("tp", slow.points),
        ("sp", fast.points),
        ("pp4", fast.points),
    )
    assert dict(of_tp.curves) == {Mode.TP: slow, Mode.SP: fast}, "they are as they were"


def test_newer_times_of_a_mode_replace_older_ones() -> None:
    older, newer = StepCurve(((1, 10),)), StepCurve(((1, 30),))
    found = StepTimes(2, {Mode.TP: older}).plus(StepTimes(2, {Mode.TP: newer}))
    assert dict(found.curves) == {Mode.TP: newer}
