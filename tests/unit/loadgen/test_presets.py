"""The named workloads: phases and shares, their scaling, and that a seed fixes every request."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.workload.arrivals import ArrivalKind, Phase, plan_arrivals, scaled_phases
from loadgen.workload.lengths import (
    Fixed,
    LogNormal,
    Mix,
    Uniform,
    longest_tokens,
    sample_tokens,
    scaled,
)
from loadgen.workload.plan import PlannedRequest, digest_of, plan_open
from loadgen.workload.presets import PRESETS, resized
from loadgen.workload.prompts import PromptKind, PromptStyle, make_prompt

STYLE = PromptStyle(PromptKind.WORDS, seed=3, vocab_size=1, tokens_per_word=1.0)
SEEDS = range(12)


def planned(
    name: str,
    *,
    seed: int = 0,
    rate_scale: float = 1.0,
    length_scale: float = 1.0,
    duration_s: float | None = None,
    run_id: str = "run",
) -> tuple[PlannedRequest, ...]:
    preset = resized(
        PRESETS[name], rate_scale=rate_scale, length_scale=length_scale, duration_s=duration_s
    )
    arrivals = plan_arrivals(preset.phases, ArrivalKind.POISSON, seed=seed)
    return plan_open(arrivals, preset.workload, seed=seed, run_id=run_id)


def test_bursty_walks_through_the_papers_rates() -> None:
    phases = PRESETS["bursty"].phases
    low = [phase.rate_per_s for phase in phases if phase.name.startswith("low")]
    high = [phase.rate_per_s for phase in phases if phase.name.startswith("burst")]
    assert (min(low), max(low)) == (2, 5)
    assert (min(high), max(high)) == (10, 30)
    assert [phase.name.split("-")[0] for phase in phases[:3]] == ["low", "burst", "low"]
    assert sum(p.rate_per_s * p.duration_s for p in phases) == pytest.approx(4_000, rel=0.01)


@pytest.mark.parametrize("name", PRESETS)
def test_every_seed_keeps_to_the_rates_of_each_phase(name: str) -> None:
    phases = PRESETS[name].phases
    for seed in SEEDS:
        requests = plan_arrivals(phases, ArrivalKind.POISSON, seed=seed)
        start_s = 0.0
        for index, phase in enumerate(phases):
            times_s = [each.at_s for each in requests if each.phase_index == index]
            expected = phase.rate_per_s * phase.duration_s
            # Six standard deviations of a Poisson count.
            assert abs(len(times_s) - expected) < 6 * math.sqrt(expected)
            for at_s in times_s:
                assert start_s <= at_s < start_s + phase.duration_s
            start_s += phase.duration_s


def test_shares_of_tiers_and_of_long_prompts() -> None:
    tiers = [each.tier for each in planned("priority")]
    assert set(tiers) == {"interactive", "standard"}
    assert tiers.count("interactive") / len(tiers) == pytest.approx(0.2, abs=0.05)
    mixed = planned("mixed")
    assert {each.tier for each in mixed} == {"interactive", "standard", "batch"}
    long = [each for each in planned("long-context") if each.prompt_tokens >= 16_000]
    assert len(long) / len(planned("long-context")) == pytest.approx(0.05, abs=0.03)
    assert {each.tier for each in planned("batch")} == {"batch"}
    assert {each.tier for each in planned("interactive")} == {"interactive"}


def test_documents_come_in_bursts_beside_steady_chat() -> None:
    requests = planned("documents")
    phases = PRESETS["documents"].phases
    for index, phase in enumerate(phases):
        of_phase = [each for each in requests if each.phase_index == index]
        chat = [each for each in of_phase if each.tier == "interactive"]
        assert len(chat) / phase.duration_s == pytest.approx(6.4, rel=0.3)
        documents = [each for each in of_phase if each.tier == "standard"]
        assert len(chat) + len(documents) == len(of_phase)
        expected = 16.5 if phase.name.startswith("documents") else 0
        assert len(documents) / phase.duration_s == pytest.approx(expected, rel=0.3)
        prompts = [each.prompt_tokens for each in documents]
        if prompts:
            assert sum(prompts) / len(prompts) == pytest.approx(4_000, rel=0.15)


def test_agents_share_a_prefix_and_their_history_grows() -> None:
    requests = planned("agentic", length_scale=0.05)
    turns: dict[str, list[PlannedRequest]] = {}
    for each in requests:
        assert each.session is not None
        turns.setdefault(each.session, []).append(each)
    assert {len(session) for session in turns.values()} == set(range(4, 17))
    assert [each.index for each in requests] == list(range(len(requests)))
    for session in turns.values():
        assert [each.turn for each in session] == list(range(len(session)))
        for earlier, later in pairwise(session):
            grown = earlier.prompt_tokens + earlier.output_tokens
            assert later.history_tokens == earlier.history_tokens + grown
            assert later.at_s is None
            assert later.think_s > 0
    thinks_s = [each.think_s for each in requests if each.turn]
    # A thousand draws of an exponential with a mean of 2 s: their mean is within six deviations.
    assert sum(thinks_s) / len(thinks_s) == pytest.approx(2.0, abs=12 / math.sqrt(len(thinks_s)))
    prompts = [str(make_prompt(STYLE, each)).split() for each in requests[:40]]
    assert len({tuple(prompt[:205]) for prompt in prompts}) == 1


@pytest.mark.parametrize("name", PRESETS)
def test_a_seed_fixes_every_request(name: str) -> None:
    first, again, other = (
        planned(name, seed=seed, run_id=run_id, duration_s=40.0)
        for seed, run_id in ((7, "one"), (7, "two"), (8, "one"))
    )
    assert digest_of(first, STYLE) == digest_of(again, STYLE)
    assert digest_of(first, STYLE) != digest_of(other, STYLE)
    assert digest_of(first, STYLE) != digest_of(first, "other prompts")
    assert digest_of(first, STYLE) != digest_of(first[:-1], STYLE)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_shrink_to_a_small_machine(name: str) -> None:
    requests = planned(name, rate_scale=0.2, length_scale=0.01, duration_s=30.0)
    assert requests
    times_s = [each.at_s for each in requests if not each.turn]
    assert all(at_s is not None and at_s < 30 for at_s in times_s)
    assert max(each.input_tokens for each in requests) <= 640
    assert min(min(each.prompt_tokens, each.output_tokens) for each in requests) >= 1


@settings(deadline=None, max_examples=50)
@given(
    rates=st.lists(st.floats(0.1, 20), min_size=1, max_size=6),
    rate_scale=st.floats(0.01, 2),
    duration_s=st.floats(0.5, 4_000),
)
def test_scaled_phases_keep_their_shares_and_fill_the_time(
    rates: list[float], rate_scale: float, duration_s: float
) -> None:
    phases = [Phase(f"p{index}", rate, 1.0 + index) for index, rate in enumerate(rates)]
    result = scaled_phases(phases, rate_scale=rate_scale, duration_s=duration_s)
    assert sum(phase.duration_s for phase in result) == pytest.approx(duration_s)
    total_s = sum(phase.duration_s for phase in phases)
    for before, after in zip(phases, result, strict=True):
        assert after.rate_per_s == pytest.approx(before.rate_per_s * rate_scale)
        assert after.duration_s / duration_s == pytest.approx(before.duration_s / total_s)


def test_scaled_lengths() -> None:
    assert scaled(Fixed(10), 0.5) == Fixed(5)
    assert scaled(Uniform(1, 9), 0.01) == Uniform(1, 1)
    assert scaled(LogNormal(100, 1.0, 2, 1_000_000), 3.0) == LogNormal(300, 1.0, 6, 1_000_000)
    assert scaled(Mix(((1.0, Fixed(4)),)), 2) == Mix(((1.0, Fixed(8)),))
    with pytest.raises(UsageError, match="--length-scale 2e\\+06 makes 10 tokens"):
        scaled(Fixed(10), 2e6)


@settings(deadline=None, max_examples=50)
@given(
    bounds=st.tuples(st.integers(1, 5_000), st.integers(1, 5_000)).map(sorted),
    factor=st.floats(0.001, 100),
    seed=st.integers(0, 99),
)
def test_scaled_lengths_stay_in_their_bounds(bounds: list[int], factor: float, seed: int) -> None:
    low, high = bounds
    rng = random.Random(seed)
    for lengths in (Uniform(low, high), LogNormal((low + high) / 2, 1.0, low, high)):
        result = scaled(lengths, factor)
        for _ in range(5):
            tokens = sample_tokens(result, rng)
            assert max(1, round(low * factor)) <= tokens <= longest_tokens(result)
        assert longest_tokens(result) == max(1, round(high * factor))
