"""The plan and the prompts: seeded, shared where asked, and independent of one another."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from loadgen.client.answer import Endpoint
from loadgen.client.payload import BodyStyle, made_ahead, request_body, request_headers
from loadgen.errors import UsageError
from loadgen.workload import plan as plan_module
from loadgen.workload.arrivals import Arrival, ArrivalKind, Phase, plan_arrivals
from loadgen.workload.lengths import Fixed, Uniform
from loadgen.workload.plan import (
    Mixture,
    Part,
    PlannedRequest,
    Sessions,
    parse_tiers,
    plan_closed,
    plan_open,
)
from loadgen.workload.prompts import (
    WORDS,
    Exchange,
    History,
    PromptKind,
    PromptStyle,
    exchange_of,
    make_prompt,
)

TIERS = (("interactive", 0.2), ("standard", 0.6), ("batch", 0.2))
PLAIN = Mixture(Uniform(4, 40), Fixed(8), tiers=(), prefix_groups=0, shared_prefix_tokens=0)
PREFIXED = replace(PLAIN, prefix_groups=3, shared_prefix_tokens=50)
WORD_STYLE = PromptStyle(PromptKind.WORDS, seed=5, vocab_size=1, tokens_per_word=1.0)
TOKEN_STYLE = replace(WORD_STYLE, kind=PromptKind.TOKENS, vocab_size=100)
COMPLETIONS = BodyStyle(Endpoint.COMPLETIONS, "demo", WORD_STYLE, 0.0, ignore_eos=False)


def closed(mixture: Mixture, requests: int = 200, seed: int = 1) -> tuple[PlannedRequest, ...]:
    return plan_closed(requests, (Part(1.0, mixture),), seed=seed, run_id="run")


def words(planned: PlannedRequest, style: PromptStyle = WORD_STYLE) -> list[str]:
    prompt = make_prompt(style, planned)
    assert isinstance(prompt, str)
    return prompt.split()


def test_tiers_are_read_with_weights() -> None:
    assert parse_tiers("interactive:0.2,standard:0.6,batch:0.2") == TIERS
    assert parse_tiers("standard") == (("standard", 1.0),)
    assert parse_tiers("") == ()


@pytest.mark.parametrize("text", ["a:0", "a:-1", "a:x", "a:1:2", "a b:1", "a:1,a:2", ":1", "a:inf"])
def test_unreadable_tiers_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_tiers(text)


def test_tiers_follow_their_weights() -> None:
    plan = closed(replace(PLAIN, tiers=TIERS), requests=5_000)
    for name, weight in TIERS:
        got = sum(planned.tier == name for planned in plan) / len(plan)
        assert got == pytest.approx(weight, abs=0.03)


def test_request_ids_are_unique_and_carry_the_run() -> None:
    ids = [planned.request_id for planned in closed(PLAIN)]
    assert len(set(ids)) == len(ids)
    assert ids[0] == "run-0"


def test_turning_tiers_or_prefixes_on_leaves_lengths_alone() -> None:
    lengths = [planned.prompt_tokens for planned in closed(PLAIN)]
    with_more = closed(replace(PREFIXED, tiers=TIERS))
    assert lengths == [planned.prompt_tokens for planned in with_more]
    assert len(set(lengths)) > 10


def test_an_open_plan_keeps_times_and_phases() -> None:
    phases = (Phase("a", 3, 1), Phase("b", 5, 1))
    arrivals = plan_arrivals(phases, ArrivalKind.UNIFORM, seed=0)
    plan = plan_open(arrivals, (Part(1.0, PLAIN),), seed=0, run_id="run")
    assert [(p.at_s, p.phase_index) for p in plan] == [(a.at_s, a.phase_index) for a in arrivals]


def test_word_prompts_have_their_length_and_are_reproducible() -> None:
    for planned in closed(PLAIN, requests=20):
        assert len(words(planned)) == planned.prompt_tokens
        assert set(words(planned)) <= set(WORDS)
        assert words(planned) == words(planned)


def test_tokens_per_word_shortens_word_prompts() -> None:
    planned = closed(replace(PLAIN, prompt=Fixed(90)), requests=1)[0]
    assert len(words(planned, replace(WORD_STYLE, tokens_per_word=3.0))) == 30


def test_prompts_differ_between_requests_and_seeds() -> None:
    first, second = closed(replace(PLAIN, prompt=Fixed(30)), requests=2)
    assert words(first) != words(second)
    assert words(first) != words(first, replace(WORD_STYLE, seed=6))


def test_a_prefix_is_shared_inside_its_group_only() -> None:
    plan = closed(replace(PREFIXED, prompt=Fixed(20)), requests=60)
    starts = {(planned.prefix_group, tuple(words(planned)[:50])) for planned in plan}
    assert len(starts) == 3
    assert len({start for _, start in starts}) == 3
    assert len({tuple(words(planned)[50:]) for planned in plan}) == 60
    assert all(len(words(planned)) == planned.input_tokens == 70 for planned in plan)


def test_token_prompts_are_ids_below_the_vocabulary() -> None:
    for planned in closed(PREFIXED, requests=20):
        prompt = make_prompt(TOKEN_STYLE, planned)
        assert isinstance(prompt, list)
        assert len(prompt) == planned.input_tokens
        assert all(isinstance(token, int) and 0 <= token < 100 for token in prompt)


def test_a_completion_body_asks_for_a_stream_with_usage() -> None:
    planned = closed(PLAIN, requests=1)[0]
    body = json.loads(request_body(COMPLETIONS, planned))
    assert body["model"] == "demo"
    assert body["max_tokens"] == 8
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["prompt"] == " ".join(words(planned))
    assert "ignore_eos" not in body
    assert "seed" not in body


def test_a_chat_body_has_messages_and_options_when_asked() -> None:
    style = replace(COMPLETIONS, endpoint=Endpoint.CHAT, temperature=0.7, ignore_eos=True)
    planned = closed(PLAIN, requests=3)[2]
    body = json.loads(request_body(style, planned))
    assert body["messages"] == [{"role": "user", "content": " ".join(words(planned))}]
    assert body["ignore_eos"] is True
    assert body["seed"] == 7
    assert "prompt" not in body


def test_headers_carry_the_request_id_and_the_tier_only_if_there_is_one() -> None:
    planned = closed(PLAIN, requests=1)[0]
    assert request_headers(planned)["X-Request-Id"] == "run-0"
    assert "X-Priority-Tier" not in request_headers(planned)
    assert request_headers(replace(planned, tier="batch"))["X-Priority-Tier"] == "batch"


def test_bodies_are_made_ahead_up_to_a_limit_and_are_the_same() -> None:
    plan = closed(PLAIN, requests=10)
    bodies = [request_body(COMPLETIONS, planned) for planned in plan]
    made: list[int] = []

    def make(planned: PlannedRequest, history: History) -> bytes:
        made.append(planned.index)
        return request_body(COMPLETIONS, planned, history)

    take = made_ahead(plan, make, bytes_max=sum(map(len, bodies[:4])))
    assert made == [0, 1, 2, 3, 4]  # the fifth was one too many
    assert [take(planned, ()) for planned in plan] == bodies
    assert made[5:] == [4, 5, 6, 7, 8, 9]


def session_of(mixture: Mixture, turns: int = 3) -> tuple[PlannedRequest, ...]:
    """The turns of one session that arrives after half a second, in the mixture's form."""
    sessions = Sessions(turns=Fixed(turns), tool=Uniform(5, 50), think_s=1.5)
    workload = (Part(1.0, replace(mixture, sessions=sessions)),)
    return plan_open([Arrival(0.5, 0)], workload, seed=2, run_id="run")


def history_of(turns: Sequence[PlannedRequest], style: PromptStyle = WORD_STYLE) -> History:
    return tuple(exchange_of(style, each, f" answer {each.turn}") for each in turns)


def test_only_the_first_turn_of_a_session_has_a_time() -> None:
    first, second, third = session_of(PREFIXED)
    assert [each.at_s for each in (first, second, third)] == [0.5, None, None]
    assert first.think_s == 0
    assert min(second.think_s, third.think_s) > 0
    assert second.history_tokens == first.prompt_tokens + first.output_tokens
    assert third.input_tokens == 50 + sum(
        each.prompt_tokens + each.output_tokens for each in (first, second)
    ) + third.prompt_tokens  # fmt: skip
    ids = [each.request_id for each in (first, second, third)]
    assert ids == ["run-0", "run-1", "run-2"]


def test_a_plan_of_sessions_has_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "MAX_PLANNED_REQUESTS", 3)
    assert len(session_of(PLAIN)) == 3
    with pytest.raises(UsageError, match="more than 3 turns in all"):
        session_of(PLAIN, turns=4)


def test_a_turn_begins_with_the_turn_before_and_its_answer() -> None:
    first, second, third = session_of(PREFIXED)
    history = history_of([first, second])
    prompts = [
        str(make_prompt(WORD_STYLE, first)),
        str(make_prompt(WORD_STYLE, second, history[:1])),
        str(make_prompt(WORD_STYLE, third, history)),
    ]
    assert prompts[1].startswith(f"{prompts[0]} answer 0 ")
    assert prompts[2].startswith(f"{prompts[1]} answer 1 ")
    assert len(prompts[2].removeprefix(f"{prompts[1]} answer 1 ").split()) == third.prompt_tokens


def test_a_session_is_a_chat_with_roles() -> None:
    first, second, _ = session_of(PREFIXED)
    (earlier,) = history = history_of([first])
    style = replace(COMPLETIONS, endpoint=Endpoint.CHAT)
    opened = json.loads(request_body(style, first))["messages"]
    messages = json.loads(request_body(style, second, history))["messages"]
    assert [each["role"] for each in opened] == ["system", "user"]
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user"]
    assert messages[:2] == opened
    assert len(messages[0]["content"].split()) == 50
    assert messages[1]["content"] == earlier.asked
    assert messages[2]["content"] == " answer 0"
    assert len(messages[3]["content"].split()) == second.prompt_tokens


def test_token_prompts_stand_in_for_answers_that_have_no_ids() -> None:
    first, second, third = session_of(PREFIXED)
    history = tuple(Exchange(each, "", "text") for each in (first, second))
    prompts = [
        make_prompt(TOKEN_STYLE, each, history[:turn])
        for turn, each in enumerate((first, second, third))
    ]
    for prompt, planned in zip(prompts, (first, second, third), strict=True):
        assert isinstance(prompt, list)
        assert len(prompt) == planned.input_tokens
    assert prompts[2][: len(prompts[1])] == prompts[1]
    assert prompts[1][: len(prompts[0])] == prompts[0]


def test_later_turns_are_not_made_ahead() -> None:
    turns = session_of(PLAIN)
    made: list[int] = []

    def make(planned: PlannedRequest, history: History) -> bytes:
        made.append(planned.index)
        return request_body(COMPLETIONS, planned, history)

    take = made_ahead(turns, make, bytes_max=10_000)
    assert made == [0]
    history = history_of(turns[:1])
    assert take(turns[1], history) == request_body(COMPLETIONS, turns[1], history)
