"""Every exchange around attention: complete, without repetition, and of the paper's volume."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_pool.head_exchange import ExchangeError, HeadExchange
from kvadaptor.geometry import PageGeometry
from tests.harness.kv.slots import head_range

WIDTHS = st.sampled_from([1, 2, 4, 8, 16])
TOKENS = st.integers(1, 70)


@st.composite
def exchanges(draw: st.DrawFn) -> HeadExchange:
    """Any heads that the width shares out evenly, KV heads fewer than members included."""
    width = draw(WIDTHS)
    kv_heads = draw(
        st.one_of(
            st.integers(1, 4).map(lambda each: each * width),
            st.sampled_from([k for k in (1, 2, 4, 8, 16) if k <= width]),
        )
    )
    least = max(kv_heads, width)
    return HeadExchange(least * draw(st.integers(1, 4)), kv_heads, width)


@given(exchanges(), TOKENS)
def test_every_member_gets_each_head_of_each_token_once(plan: HeadExchange, tokens: int) -> None:
    got: list[Counter[tuple[str, int, int]]] = [Counter() for _ in range(plan.width)]
    for chunk in plan.before(tokens):
        for token in chunk.tokens:
            got[chunk.target].update(("q", token, head) for head in chunk.heads)
            got[chunk.target].update(("kv", token, head) for head in chunk.kv_heads)
    padded = range(plan.share(tokens) * plan.width)
    for member, found in enumerate(got):
        assert set(found.values()) == {1}
        assert found.keys() == {
            *(("q", token, head) for token in padded for head in plan.heads_of(member)),
            *(("kv", token, head) for token in padded for head in plan.kv_heads_of(member)),
        }


@given(exchanges(), TOKENS)
def test_afterwards_every_token_is_whole_on_the_member_that_computes_it(
    plan: HeadExchange, tokens: int
) -> None:
    got: Counter[tuple[int, int, int]] = Counter()
    for chunk in plan.after(tokens):
        assert not chunk.kv_heads
        got.update((chunk.target, token, head) for token in chunk.tokens for head in chunk.heads)
    assert set(got.values()) == {1}
    assert got.keys() == {
        (member, token, head)
        for member in range(plan.width)
        for token in plan.tokens_of(member, tokens)
        for head in range(plan.heads)
    }


@given(exchanges(), TOKENS)
def test_tokens_are_padded_as_little_as_possible(plan: HeadExchange, tokens: int) -> None:
    padded = plan.share(tokens) * plan.width
    assert padded % plan.width == 0
    assert tokens <= padded < tokens + plan.width
    shares = [token for member in range(plan.width) for token in plan.tokens_of(member, tokens)]
    assert shares == list(range(padded))


@given(exchanges())
def test_members_hold_the_heads_that_tp_pages_hold(plan: HeadExchange) -> None:
    pages = PageGeometry(1, plan.kv_heads, 8, 8, 2, 16)
    group_size = plan.heads // plan.kv_heads
    assert plan.replication == plan.width // pages.slots_per_page(plan.width)
    for member in range(plan.width):
        assert plan.kv_heads_of(member) == head_range(pages, member, plan.width)
        # Each query head meets its own KV head, at the place where attention looks for it.
        kv_heads = plan.kv_heads_of(member)
        local_group = plan.heads_each // plan.kv_heads_each
        for place, head in enumerate(plan.heads_of(member)):
            assert kv_heads[place // local_group] == head // group_size


@given(exchanges(), TOKENS)
def test_replication_costs_the_links_what_algorithm_1_of_the_paper_costs(
    plan: HeadExchange, tokens: int
) -> None:
    share, copies = plan.share(tokens), plan.replication
    sent = sum(
        len(chunk.tokens) * len(chunk.kv_heads)
        for chunk in plan.before(tokens)
        if chunk.source == 0 != chunk.target
    )
    inside = plan.width // copies
    all_to_all = (inside - 1) * share * plan.kv_heads_each
    all_gather = (copies - 1) * inside * share * plan.kv_heads_each
    assert sent == all_to_all + all_gather


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "said"),
    [
        (6, 4, 2, "share 4 KV heads"),
        (28, 4, 8, "does not divide the model's 28 query heads"),
        (24, 3, 2, "nor is a multiple"),
        (12, 12, 8, "does not divide the model's 12 query heads"),
        (24, 12, 8, "nor is a multiple"),
        (8, 4, 0, "do not share"),
    ],
)
def test_uneven_heads_are_refused_with_the_reason(
    heads: int, kv_heads: int, width: int, said: str
) -> None:
    with pytest.raises(ExchangeError, match=said):
        HeadExchange(heads, kv_heads, width)
