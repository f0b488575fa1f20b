"""When a soak finds a leak, and when it does not."""

import os
from dataclasses import replace

import psutil
import pytest

from tests.soak import measures
from tests.soak.measures import JUDGED_S, MIB, WARM_S, Sample, pages_lost, sample, slopes

STEP_S = 10.0


def life(seconds: float, mib_per_minute: float = 0.0, files: int = 40) -> list[Sample]:
    """A process that grows steadily, and by a lot while it is warm."""
    found = []
    for number in range(int(seconds / STEP_S)):
        at_s = number * STEP_S
        warm = min(at_s, WARM_S) * 10
        rss = int((warm + at_s / 60 * mib_per_minute) * MIB)
        found.append(Sample(at_s, rss, files, 9))
    return found


def test_what_grows_only_while_it_is_warm_is_no_leak() -> None:
    found = slopes(life(1_000))
    assert found is not None
    assert found.leaks == []
    assert found.own_mib == pytest.approx(0.0, abs=1e-6)


def test_steady_growth_is_a_leak() -> None:
    found = slopes(life(1_000, mib_per_minute=1.5))
    assert found is not None
    assert found.leaks == ["memory"]
    assert found.own_mib == pytest.approx(1.5, abs=1e-3)


def test_files_and_threads_count_too() -> None:
    samples = [
        Sample(each.at_s, each.own_bytes, 40 + number, 9 + number // 4)
        for number, each in enumerate(life(1_000))
    ]
    found = slopes(samples)
    assert found is not None
    assert found.leaks == ["files", "threads"]


def test_threads_of_a_pool_that_fills_are_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "POOLED_THREADS", 8)
    samples = life(WARM_S + JUDGED_S + 2 * STEP_S)

    def growing(threads_each: int) -> list[str]:
        found = slopes(
            [replace(s, threads=9 + n // 8 * threads_each) for n, s in enumerate(samples)]
        )
        assert found is not None
        return found.leaks

    assert growing(2) == []
    assert growing(5) == ["threads"]


def test_a_short_life_is_not_judged() -> None:
    assert slopes(life(WARM_S + JUDGED_S - STEP_S)) is None


def test_pages_must_come_back() -> None:
    pages = {"total": 9, "free": 0, "owned": 8, "leased": 0}
    assert pages_lost({0: pages}, {0: dict(pages)}) == []
    assert pages_lost({0: pages}, {0: {**pages, "owned": 7, "leased": 1}})
    assert pages_lost({0: pages}, {}) == ["rank 0: it is not there"]


def test_this_process_can_be_read() -> None:
    found = sample(psutil.Process(os.getpid()), 3.0)
    assert found is not None
    assert found.own_bytes > MIB
    assert found.files > 0
    assert found.threads > 0
