"""Collections wait for the end of a switch, and for nobody who has switched them off himself."""

import gc
from collections.abc import Iterator

import pytest

from tests.harness.worker.virtual_host import VirtualHost
from worker.io.gc_pause import PAUSE_MAX_S, PAUSE_MIN_S, GcPause


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """The process' collector, whatever a test finds or leaves."""
    gc.enable()
    yield
    gc.enable()


def test_nothing_is_collected_between_pause_and_resume() -> None:
    found: list[str] = []

    def told(phase: str, _: dict[str, int]) -> None:
        found.append(phase)

    collector = GcPause()
    gc.callbacks.append(told)
    try:
        collector.pause()
        collector.pause()
        kept = [[number] for number in range(50_000)]
        assert not found
        collector.resume()
        kept += [[number] for number in range(50_000)]
        assert found
    finally:
        gc.callbacks.remove(told)
    assert len(kept) == 100_000
    assert gc.isenabled()


def test_a_switch_that_does_not_end_is_collected_in() -> None:
    host = VirtualHost()
    collector = GcPause(host)
    collector.pause()
    collector.look()
    assert not gc.isenabled()
    host.sleep(PAUSE_MAX_S + 1)
    collector.look()
    assert gc.isenabled()


def test_steps_end_a_pause_only_after_a_while() -> None:
    host = VirtualHost()
    collector = GcPause(host)
    collector.pause()
    collector.resume_soon()
    assert not gc.isenabled()
    host.sleep(PAUSE_MIN_S)
    collector.resume_soon()
    assert gc.isenabled()


def test_a_second_switch_begins_the_pause_anew() -> None:
    host = VirtualHost()
    collector = GcPause(host)
    collector.pause()
    host.sleep(0.8 * PAUSE_MIN_S)
    collector.pause()
    host.sleep(0.8 * PAUSE_MIN_S)
    collector.resume_soon()
    assert not gc.isenabled()
    host.sleep(PAUSE_MAX_S - PAUSE_MIN_S)
    collector.look()
    assert not gc.isenabled()
    collector.resume_soon()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    collector = GcPause()
    gc.disable()
    collector.pause()
    collector.resume()
    assert not gc.isenabled()


def test_resume_without_pause_changes_nothing() -> None:
    gc.disable()
    GcPause().resume()
    assert not gc.isenabled()
