"""Seeds that found something, and today's share of those that only the long run runs all of."""

from datetime import UTC, date, datetime, timedelta

import pytest

from tests.simulation.seeds import DAY_VARIABLE, DAYS, FOUND, LONG, Found, share_of, today
from tests.simulation.sweep import Kind, failure_of, sweep

CHUNK = 50


def failures_of(seeds: range, kind: Kind) -> str:
    """One line for each failure, with the command that replays it."""
    runs = (failure_of(seed, kind=kind) for seed in seeds)
    return "\n".join(filter(None, runs))


@pytest.mark.parametrize("found", FOUND, ids=str)
def test_what_a_seed_found_is_mended(found: Found) -> None:
    failure = failures_of(range(found.seed, found.seed + 1), found.kind)
    assert not failure, f"{failure}\nIt has found before: {found.what}."


@pytest.mark.parametrize("name", LONG)
@pytest.mark.timeout(600)
def test_invariants_hold_with_the_seeds_of_the_day(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    day, long = today(), LONG[name]
    seeds = share_of(long.seeds, day)
    with capsys.disabled():
        print(f"\n{name} seeds of {day}: {seeds[0]} to {seeds[-1]}", flush=True)
    failures = failures_of(seeds, long.kind)
    assert not failures, f"{failures}\nAll of them: {DAY_VARIABLE}={day} pytest {__file__}"


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "first"),
    [(name, first) for name, long in LONG.items() for first in long.seeds[::CHUNK]],
)
def test_invariants_hold_with_all_seeds(name: str, first: int) -> None:
    seeds = range(first, min(first + CHUNK, LONG[name].seeds.stop))
    failures = failures_of(seeds, LONG[name].kind)
    assert not failures, failures


@pytest.mark.parametrize("seeds", [*(long.seeds for long in LONG.values()), range(3, 13)])
@pytest.mark.parametrize("first", [date(2026, 12, 28), date(2028, 2, 26), date(2026, 3, 28)])
def test_days_in_a_row_have_every_seed_once(seeds: range, first: date) -> None:
    shares = [share_of(seeds, first + timedelta(days=days)) for days in range(DAYS)]
    assert sorted(seed for share in shares for seed in share) == list(seeds)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_another_day_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DAY_VARIABLE, "2026-11-20")
    assert today() == date(2026, 11, 20)
    monkeypatch.delenv(DAY_VARIABLE)
    assert abs(today() - datetime.now(UTC).date()) <= timedelta(days=1)


def test_the_kind_of_a_failure_is_in_its_command() -> None:
    assert str(Found(3, LONG["parts"].kind, "")) == "make sim SEED=3 PARTS=1"
    assert str(Found(3, LONG["borrow"].kind, "")) == "make sim SEED=3 PARTS=1 BORROW=1"
    assert str(Found(3, LONG["wide"].kind, "")) == "make sim SEED=3 WIDE=1"
    assert str(Found(3, LONG["pipelines"].kind, "")) == "make sim SEED=3 PIPELINES=1"


def test_a_sweep_in_several_processes_names_each_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Seed 6 finds this bug."""
    bug = "followers do not wait for their leader's last step"
    failed = sweep(range(1, 7), Kind(mutation=bug), jobs=2)
    *lines, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("make sim SEED=6    ") for line in lines)
    assert last.startswith(f"{failed} of 6 seeds failed, 1 to 6, in ")
