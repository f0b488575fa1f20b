"""Length distributions: what they draw, and what text is refused."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.workload.lengths import (
    MAX_LENGTH_TOKENS,
    Fixed,
    Lengths,
    LogNormal,
    Mix,
    Uniform,
    longest_tokens,
    parse_lengths,
    sample_tokens,
)

simple_lengths = st.one_of(
    st.builds(Fixed, st.integers(1, 5000)),
    st.tuples(st.integers(1, 500), st.integers(0, 500)).map(
        lambda pair: Uniform(pair[0], pair[0] + pair[1])
    ),
    st.tuples(st.floats(1, 1e6), st.floats(0, 10), st.integers(1, 50), st.integers(50, 5000)).map(
        lambda four: LogNormal(*four)
    ),
)
all_lengths = st.one_of(
    simple_lengths,
    st.lists(st.tuples(st.floats(0.01, 10), simple_lengths), min_size=1, max_size=4).map(
        lambda parts: Mix(tuple(parts))
    ),
)


def draw(lengths: Lengths, count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [sample_tokens(lengths, rng) for _ in range(count)]


@settings(deadline=None)
@given(lengths=all_lengths, seed=st.integers(0, 1000))
def test_samples_are_whole_and_within_bounds(lengths: Lengths, seed: int) -> None:
    for tokens in draw(lengths, 20, seed):
        assert isinstance(tokens, int)
        assert 1 <= tokens <= longest_tokens(lengths)


def test_text_forms() -> None:
    assert parse_lengths("fixed:128") == Fixed(128)
    assert parse_lengths("uniform:16-256") == Uniform(16, 256)
    assert parse_lengths("lognormal:mean=120,sigma=0.6,max=512") == LogNormal(120, 0.6, 1, 512)
    assert parse_lengths("mix:0.8*fixed:32+0.2*fixed:512") == Mix(
        ((0.8, Fixed(32)), (0.2, Fixed(512)))
    )
    assert parse_lengths("mix:3*lognormal:sigma=0.5,mean=9,min=2+1*uniform:1-4") == Mix(
        ((3, LogNormal(9, 0.5, 2, MAX_LENGTH_TOKENS)), (1, Uniform(1, 4)))
    )


def test_uniform_reaches_both_ends() -> None:
    assert set(draw(Uniform(3, 6), 400)) == {3, 4, 5, 6}


def test_lognormal_has_the_mean_that_was_asked_for() -> None:
    samples = draw(LogNormal(120, 0.6, 1, MAX_LENGTH_TOKENS), 40_000)
    # The standard error of this mean is 0.4 tokens; exp(mu) alone would give 100.
    assert sum(samples) / len(samples) == pytest.approx(120, abs=2)


def test_lognormal_is_clipped_at_its_ends() -> None:
    samples = draw(LogNormal(120, 2.0, 40, 200), 2_000)
    assert min(samples) == 40
    assert max(samples) == 200


def test_mix_follows_its_weights() -> None:
    samples = draw(parse_lengths("mix:8*fixed:32+2*fixed:512"), 20_000)
    assert samples.count(32) / len(samples) == pytest.approx(0.8, abs=0.015)
    assert set(samples) == {32, 512}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "128",
        "fixed:",
        "fixed:0",
        "fixed:-3",
        "fixed:1.5",
        "fixed:1_000",
        "fixed:1000001",
        "fixed:99999999999999999999",
        "uniform:5",
        "uniform:9-3",
        "uniform:0-3",
        "normal:3",
        "lognormal:mean=120",
        "lognormal:mean=0.5,sigma=1",
        "lognormal:mean=nan,sigma=1",
        "lognormal:mean=9,sigma=-1",
        "lognormal:mean=9,sigma=99",
        "lognormal:mean=9,sigma=1,min=9,max=3",
        "lognormal:mean=9,sigma=1,mode=3",
        "lognormal:mean=9,,sigma=1",
        "lognormal:mean=9,mean=8,sigma=1",
        "mix:",
        "mix:fixed:3",
        "mix:0*fixed:3",
        "mix:-1*fixed:3",
        "mix:1*mix:1*fixed:3",
        "mix:1*fixed:3+",
    ],
)
def test_unreadable_lengths_are_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="write for example fixed:128"):
        parse_lengths(text)
