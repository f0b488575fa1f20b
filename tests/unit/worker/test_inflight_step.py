"""Whose tokens are taken before the next launch."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.harness.worker.virtual_host import VirtualHost
from worker.rank.inflight_step import FIRST_TOKEN_WAIT_S, InflightStep


@dataclass
class Plan:
    reads_prompts: bool


class Event:
    """Is there at the n-th look."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks <= 0


@dataclass
class Result:
    copy_event: Any

    def get_output(self) -> str:
        return "tokens"


@pytest.mark.parametrize(
    ("reads_prompts", "looks", "first"),
    [(True, 1, True), (True, 3, True), (True, 10**9, False), (False, 1, False)],
    ids=["there", "there soon", "the device is busy", "nobody waits for its first"],
)
def test_first_tokens_go_first_if_they_are_there(
    reads_prompts: bool, looks: int, first: bool
) -> None:
    step = InflightStep(Plan(reads_prompts), Result(Event(looks)))
    assert step.goes_first(VirtualHost()) is first
    assert step.is_asynchronous
    assert step.tokens() == "tokens"


def test_the_wait_is_bounded() -> None:
    host = VirtualHost()
    assert not InflightStep(Plan(True), Result(Event(10**9))).goes_first(host)
    assert host.now_ns() < 2e9 * FIRST_TOKEN_WAIT_S


def test_a_result_that_is_there_is_taken_as_it_is() -> None:
    step = InflightStep(Plan(True), "output")
    assert not step.is_asynchronous
    assert not step.goes_first(VirtualHost())
    assert step.tokens() == "output"
