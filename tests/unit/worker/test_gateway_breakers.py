"""When the circuit of a link to a gateway opens, is probed, and closes again."""

from hypothesis import given
from hypothesis import strategies as st

from worker.io.gateway_breakers import (
    CONNECT_LIMIT_S,
    FORGIVEN_AFTER_S,
    GONE_AFTER_S,
    HOLDS_S,
    GatewayBreakers,
)

TO = "tcp://gateway:1"
TICK_S = 0.1


def up(now_s: float = 0.0) -> GatewayBreakers:
    """A link that has come up."""
    links = GatewayBreakers()
    links.add(TO, now_s)
    links.mark_up(TO, now_s)
    links.tick(now_s)
    assert links.link_cuts() == ()
    return links


def is_open(links: GatewayBreakers) -> bool:
    return any(cut.is_open for cut in links.link_cuts())


def test_a_link_that_breaks_is_told_at_once_and_used_again_when_it_has_held() -> None:
    links = up()
    links.mark_down(TO, 5.0)
    (cut,) = links.link_cuts()
    assert (cut.reply_to, cut.number, cut.is_open) == (TO, 1, True)
    links.tick(60.0)
    assert is_open(links), "a link that is down is not used, however long ago it broke"
    links.mark_up(TO, 60.0)
    links.tick(60.0 + HOLDS_S[0] - TICK_S)
    assert is_open(links)
    links.tick(60.0 + HOLDS_S[0])
    (cut,) = links.link_cuts()
    assert (cut.number, cut.is_open) == (1, False), "told on, for a coordinator that was away"


def test_one_that_never_comes_up_counts_as_broken() -> None:
    links = GatewayBreakers()
    links.add(TO, 0.0)
    links.tick(CONNECT_LIMIT_S - TICK_S)
    assert links.link_cuts() == ()
    links.mark_down(TO, CONNECT_LIMIT_S - TICK_S)
    assert links.link_cuts() == (), "the first attempt was refused, the next may not be"
    links.tick(CONNECT_LIMIT_S)
    assert is_open(links)


def test_each_break_holds_it_open_for_longer_until_all_are_forgiven() -> None:
    links, now_s = up(), 0.0
    for number, hold_s in enumerate((*HOLDS_S, HOLDS_S[-1]), 1):
        links.mark_down(TO, now_s)
        links.mark_up(TO, now_s)
        links.tick(now_s + hold_s - TICK_S)
        assert is_open(links)
        now_s += hold_s
        links.tick(now_s)
        (cut,) = links.link_cuts()
        assert (cut.number, cut.is_open) == (number, False)
    links.tick(now_s + FORGIVEN_AFTER_S)
    assert links.link_cuts() == ()
    links.mark_down(TO, now_s + FORGIVEN_AFTER_S)
    (cut,) = links.link_cuts()
    assert cut.number == len(HOLDS_S) + 2, "breaks are counted on, so that each is acted on"


def test_one_that_stays_down_is_given_up() -> None:
    links = up()
    links.mark_down(TO, 0.0)
    assert links.tick(GONE_AFTER_S - TICK_S) == []
    assert links.tick(GONE_AFTER_S) == [TO]
    links.remove(TO)
    assert links.link_cuts() == ()


@given(period_s=st.floats(0.1, 8.0), down_share=st.floats(0.05, 0.95), ends_up=st.booleans())
def test_one_that_flaps_changes_at_most_once_in_ten_seconds(
    period_s: float, down_share: float, ends_up: bool
) -> None:
    """But for the first pair: a single break should not cost a cell its only group for long."""
    links, now_s, changes, was_open, is_up = up(), 0.0, 0, False, True
    while now_s < 120.0:
        wants_up = (now_s % period_s) / period_s >= down_share
        if wants_up is not is_up:
            is_up = wants_up
            (links.mark_up if is_up else links.mark_down)(TO, now_s)
        links.tick(now_s)
        changes += is_open(links) is not was_open
        was_open = is_open(links)
        now_s += TICK_S
    assert changes <= 2 + 120.0 / 10.0
    if ends_up:
        links.mark_up(TO, now_s)
        links.tick(now_s + HOLDS_S[-1])
        assert not is_open(links)
