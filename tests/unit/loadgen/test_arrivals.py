"""Send times: rates within statistical bounds, phases kept apart, and what is refused."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.workload.arrivals import (
    MAX_PLANNED_REQUESTS,
    Arrival,
    ArrivalKind,
    Phase,
    check_phases,
    parse_duration_s,
    parse_phases,
    phase_starts_s,
    plan_arrivals,
)

LOW_HIGH_LOW = "low:2/s:20s,high:12/s:20s,low:2/s:20s"

phase_lists = st.lists(
    st.builds(
        Phase,
        name=st.just("p"),
        rate_per_s=st.floats(0, 40),
        duration_s=st.floats(0.01, 5),
    ),
    min_size=1,
    max_size=5,
)


def times_of(phases: tuple[Phase, ...], kind: ArrivalKind, seed: int = 1) -> list[float]:
    return [arrival.at_s for arrival in plan_arrivals(phases, kind, seed=seed)]


@pytest.mark.parametrize("seed", range(8))
def test_poisson_count_and_spread_follow_the_rate(seed: int) -> None:
    rate_per_s, duration_s = 50.0, 200.0
    times_s = times_of((Phase("steady", rate_per_s, duration_s),), ArrivalKind.POISSON, seed)
    expected = rate_per_s * duration_s
    # Five standard deviations, which is 5%: chance alone passes it once in a million seeds.
    assert abs(len(times_s) - expected) < 5 * math.sqrt(expected)
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    mean_s = sum(gaps_s) / len(gaps_s)
    variation = math.sqrt(sum((gap - mean_s) ** 2 for gap in gaps_s) / len(gaps_s)) / mean_s
    assert variation == pytest.approx(1.0, abs=0.05)  # exponential gaps; evenly spaced ones have 0


@settings(deadline=None)
@given(phases=phase_lists, kind=st.sampled_from(ArrivalKind), seed=st.integers(0, 5))
def test_times_are_ordered_and_lie_inside_their_phase(
    phases: list[Phase], kind: ArrivalKind, seed: int
) -> None:
    arrivals = plan_arrivals(phases, kind, seed=seed, burst_requests=3)
    starts_s = phase_starts_s(phases)
    assert list(arrivals) == sorted(arrivals, key=lambda arrival: arrival.at_s)
    for arrival in arrivals:
        start_s = starts_s[arrival.phase_index]
        assert start_s <= arrival.at_s <= start_s + phases[arrival.phase_index].duration_s


@settings(deadline=None)
@given(
    rate=st.integers(1, 400).map(lambda tenths: tenths / 10),
    duration=st.integers(1, 400).map(lambda tenths: tenths / 10),
    kind=st.sampled_from([ArrivalKind.UNIFORM, ArrivalKind.BURST]),
)
def test_deterministic_kinds_send_exactly_rate_times_duration(
    rate: float, duration: float, kind: ArrivalKind
) -> None:
    sent = len(times_of((Phase("p", rate, duration),), kind))
    assert sent == math.ceil(round(rate * duration, 6))


def test_uniform_times_are_evenly_spaced() -> None:
    assert times_of((Phase("p", 4, 1.0),), ArrivalKind.UNIFORM) == [0.0, 0.25, 0.5, 0.75]


def test_bursts_come_together_at_the_same_mean_rate() -> None:
    arrivals = plan_arrivals((Phase("p", 4, 2.0),), ArrivalKind.BURST, seed=0, burst_requests=4)
    assert [arrival.at_s for arrival in arrivals] == [0.0] * 4 + [1.0] * 4


def test_same_seed_same_times_and_another_seed_other_times() -> None:
    phases = parse_phases(LOW_HIGH_LOW)
    first = times_of(phases, ArrivalKind.POISSON, seed=7)
    assert first == times_of(phases, ArrivalKind.POISSON, seed=7)
    assert first != times_of(phases, ArrivalKind.POISSON, seed=8)


def test_changing_one_phase_leaves_the_others_alone() -> None:
    def in_last_phase(high: float) -> list[Arrival]:
        phases = (Phase("a", 5, 2), Phase("b", high, 2), Phase("c", 5, 2))
        arrivals = plan_arrivals(phases, ArrivalKind.POISSON, seed=3)
        return [arrival for arrival in arrivals if arrival.phase_index == 2]

    assert in_last_phase(1) == in_last_phase(30) != []


def test_phases_are_read_with_unique_names() -> None:
    assert parse_phases(LOW_HIGH_LOW) == (
        Phase("low", 2, 20),
        Phase("high", 12, 20),
        Phase("low#2", 2, 20),
    )


def test_cycles_repeat_the_phases() -> None:
    names = [phase.name for phase in parse_phases("a:1/s:1s,b:60/m:500ms", cycles=2)]
    assert names == ["a", "b", "a#2", "b#2"]
    assert parse_phases("b:60/m:500ms")[0] == Phase("b", 1.0, 0.5)


def test_the_high_phase_gets_its_rate() -> None:
    arrivals = plan_arrivals(parse_phases(LOW_HIGH_LOW), ArrivalKind.POISSON, seed=0)
    counts = [sum(arrival.phase_index == index for arrival in arrivals) for index in range(3)]
    for count, expected in zip(counts, (40, 240, 40), strict=True):
        assert abs(count - expected) < 4 * math.sqrt(expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "low",
        "low:2/s",
        "low:2:20s",
        "low:x/s:20s",
        "low:-1/s:20s",
        "low:nan/s:20s",
        "low:inf/s:1s",
        "low:2/s:20y",
        "low:2/s:0s",
        "low:2/s:-3s",
        "low:2/h:3s",
        "low:2/s:20s,",
        "idle:0/s:20s",
        "lo w:2/s:20s",
        f"big:{MAX_PLANNED_REQUESTS + 1}/s:1s",
        "long:0.1/s:30h",
    ],
)
def test_unreadable_phases_are_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_phases(text)
    assert "\n" not in str(refusal.value)


def test_too_many_phases_and_no_cycle_are_refused() -> None:
    with pytest.raises(UsageError, match="limit of 1000"):
        parse_phases("a:1/s:1ms,b:1/s:1ms", cycles=501)
    with pytest.raises(UsageError, match="at least 1"):
        parse_phases("a:1/s:1s", cycles=0)


def test_an_idle_phase_beside_a_busy_one_is_fine() -> None:
    phases = check_phases((Phase("idle", 0, 5), Phase("busy", 2, 5)))
    assert all(at_s >= 5 for at_s in times_of(phases, ArrivalKind.POISSON))


@pytest.mark.parametrize(
    ("text", "seconds"), [("20s", 20), ("500ms", 0.5), ("2m", 120), ("1h", 3600), ("1.5", 1.5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds
