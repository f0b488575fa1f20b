"""The requests that a walk through layouts meets, by what is special about them."""

import random
from collections import defaultdict
from collections.abc import Iterator

from tests.harness.cells.switch_matrix import Kind, Moment, Row
from tests.harness.vllm.reshard_cases import Case, draw_case

SEEDS = range(320)
"""Those of all requests that there may be: what plain vLLM makes of them is known."""
PER_KIND = 12
PROMPT_TOKENS_MIN, NEW_TOKENS_MIN = 100, 24
"""Requests are so long that a switch can meet them in their prompt, and before their end."""
LEAVES_AFTER_MIN = 3
LASTING = 4
"""So many of each kind last the longest: they cross two switches."""
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def kind_of(case: Case) -> Kind:
    """What is the most special about a request."""
    if case.leaves_after is not None:
        return Kind.LEAVES
    if "regex" in case.params:
        return Kind.GRAMMAR
    if "stop_token_ids" in case.params:
        return Kind.STOPS
    if any(name in case.params for name in PENALTIES):
        return Kind.PENALTIES
    return Kind.GREEDY if case.is_greedy else Kind.SAMPLED


def is_long(case: Case) -> bool:
    """Whether a switch can meet it at every moment."""
    stays = case.leaves_after is None or case.leaves_after >= LEAVES_AFTER_MIN
    is_in_time = len(case.prompt) >= PROMPT_TOKENS_MIN
    return stays and is_in_time and int(case.params["max_tokens"]) >= NEW_TOKENS_MIN


def lifetime_tokens(case: Case) -> int:
    """Tokens that it has at most when its client has all, or leaves."""
    tokens = int(case.params["max_tokens"])
    return tokens if case.leaves_after is None else min(tokens, case.leaves_after)


class Requests:
    """Hands out a walk's requests: those that are used the least come first."""

    def __init__(self, draw: random.Random) -> None:
        kinds: dict[Kind, list[Case]] = defaultdict(list)
        for case in map(draw_case, SEEDS):
            if is_long(case):
                kinds[kind_of(case)].append(case)
        self._kinds = {kind: draw.sample(of, PER_KIND) for kind, of in sorted(kinds.items())}
        self._uses = dict.fromkeys((case.seed for case in self), 0)
        self._draw = draw

    def __iter__(self) -> Iterator[Case]:
        return (case for of in self._kinds.values() for case in of)

    def for_row(self, row: Row) -> Case:
        """The request that the row is about; no rank has read a prompt that is to be read in it."""
        of = self._kinds[row.kind]
        if row.moment is Moment.AFTER:
            lasting = sorted(of, key=lifetime_tokens)[-LASTING:]
            return self._use(min(lasting, key=lambda case: self._uses[case.seed]))
        unread = [case for case in of if self._uses[case.seed] == 0]
        is_read = row.moment not in (Moment.PREFILL, Moment.QUEUE)
        if unread and (not is_read or len(unread) == len(of)):
            return self._use(unread[0])
        used = [case for case in of if self._uses[case.seed]]
        return self._use(min(used, key=lambda case: self._uses[case.seed]))

    def any(self) -> Case:
        """Any request, for company; prompts that no rank has read are left to rows."""
        read = [case for case in self if self._uses[case.seed]]
        return self._use(self._draw.choice(read or list(self)))

    def _use(self, case: Case) -> Case:
        self._uses[case.seed] += 1
        return case
