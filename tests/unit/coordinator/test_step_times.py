"""Measured step times on their way to `aileron explain`."""

from typing import Any

import msgspec

from comm_pool.layout import Mode, Rank
from comm_pool.mixed import Mixed
from coordinator.cli.operate import step_times_text
from coordinator.core.views import step_times_view
from coordinator.protocol.messages.steps import WidthTimes
from coordinator.ranks.roster import Roster
from tests.harness.coordinator.builders import hello

SHAPE = Mixed(2, 2)


def roster() -> Roster:
    made = Roster(4)
    for rank in range(4):
        made.on_hello(hello(rank), 0)
    return made


def told(made: Roster | None = None) -> list[dict[str, Any]]:
    view: dict[str, Any] = step_times_view(made or roster())
    times: list[dict[str, Any]] = view["step_times"]
    return times


def test_a_rank_tells_in_which_widths_it_has_sp() -> None:
    assert roster().can_compute(Rank(0), 4, Mode.SP)
    assert not roster().can_compute(Rank(0), 2, Mode.SP)
    assert not roster().can_compute(Rank(0), 1, Mode.SP)
    assert roster().can_compute(Rank(0), 4, SHAPE)
    assert not roster().can_compute(Rank(0), 8, SHAPE)


def test_the_view_has_each_width_once() -> None:
    one, four = told()
    assert one == {
        "width": 1,
        "sp_from_tokens": None,
        "mixed_from_tokens": {},
        "floor_ms": {},
        "pace_tokens": {},
        "kv_tokens": 160,
        "curves": {"dp": [{"tokens": 1, "ms": 9.0}, {"tokens": 512, "ms": 40.0}]},
    }
    assert (four["width"], four["sp_from_tokens"], four["kv_tokens"]) == (4, 64, 640)
    assert four["mixed_from_tokens"] == {"sp2tp2": 32}
    assert set(four["curves"]) == {"tp", "sp", "sp2tp2"}
    assert step_times_view(Roster(4)) == {"step_times": [], "borrowing_bytes": {}}


def test_the_rank_with_the_longest_loans_and_the_one_with_fewest_pages_count() -> None:
    """Rank 0 has whole layers and so neither loans nor much room; rank 1 has both."""
    curves = (("dp", ((1, 9_000),)),)
    made = Roster(2)
    for rank, (floors, pages) in enumerate([((), 11), ((("dp", 69_000),), 21)]):
        times = (WidthTimes(1, curves, floor_us=floors),)
        own = hello(rank, pages_total=pages)
        made.on_hello(msgspec.structs.replace(own, step_times=times), 0)
    (one,) = told(made)
    assert (one["floor_ms"], one["kv_tokens"]) == ({"dp": 69.0}, 160)


def test_the_text_shows_the_curves_and_what_follows_from_them() -> None:
    one, four = told()
    text = step_times_text(four)
    assert "tp4 ms" in text
    assert "sp4 ms" in text
    assert "sp2tp2 ms" in text
    assert "20.00" in text
    assert "shift2tp2 computes steps of at least 32 tokens in sp2tp2, smaller ones in tp." in text
    assert "shift4 computes steps of at least 64 tokens in sp, smaller ones in tp." in text
    assert "shift" not in step_times_text(one)
    stages = [{"tokens": 1, "ms": 3.25}, {"tokens": 7, "ms": 4.5}]
    more = step_times_text({**four, "curves": {**four["curves"], "pp4": stages}}).splitlines()
    (title,) = [line for line in more if line.strip().startswith("tokens ")]
    assert title.endswith("pp4 ms")
    assert ["7", "4.50"] in [line.split() for line in more]
    never = {**four, "sp_from_tokens": None}
    assert "shift4 computes all steps in tp." in step_times_text(never)


def test_the_text_says_how_long_steps_take_at_least_and_why() -> None:
    _, four = told()
    capacity = "A group 4 wide holds KV of 640 tokens, in stages at least that."
    assert capacity in step_times_text(four)
    floors = {"floor_ms": {"sp": 75.64, "sp2tp2": 37.0}}
    text = step_times_text({**four, **floors, "pace_tokens": {"sp": 660}})
    assert (
        "A step in sp4 takes at least 75.6 ms: it reads the parts of the weights that the group "
        "lacks."
    ) in text
    assert "A step in sp2tp2 takes at least 37.0 ms" in text
    assert "tp4 takes" not in text
    assert (
        "Beside decodes sp4 reads prompts until a step has 660 tokens, which hide that time."
    ) in text
    assert "Beside decodes sp2tp2" not in text


def test_the_view_says_how_large_prompts_make_steps_that_borrow() -> None:
    curves = (("sp", ((1, 69_000),)), ("tp", ((1, 12_000),)))
    times = WidthTimes(4, curves, 64, (), (("sp", 69_000),), (("sp", 768),))
    made = Roster(4)
    made.on_hello(msgspec.structs.replace(hello(0), step_times=(times,)), 0)
    (view,) = told(made)
    assert view["pace_tokens"] == {"sp": 768}
