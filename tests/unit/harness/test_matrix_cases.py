"""Requests for walks through layouts: of every kind, and with prompts that no rank has read."""

import random

import pytest

from tests.harness.cells.switch_matrix import Kind, Moment, draw_walk
from tests.harness.vllm.matrix_cases import PER_KIND, Requests, is_long, kind_of

SEEDS = (0, 20261126)
UNREAD = (Moment.PREFILL, Moment.QUEUE)


@pytest.mark.parametrize("seed", SEEDS)
def test_there_are_as_many_of_every_kind(seed: int) -> None:
    kinds = [kind_of(case) for case in Requests(random.Random(seed))]
    assert {kind: kinds.count(kind) for kind in Kind} == {
        kind: 0 if kind is Kind.NONE else PER_KIND for kind in Kind
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_have_requests_of_their_kind_whose_prompts_are_to_be_read(seed: int) -> None:
    requests = Requests(random.Random(seed))
    used: set[int] = set()
    for row in draw_walk(seed):
        if row.moment is Moment.IDLE:
            continue
        case = requests.for_row(row)
        assert is_long(case)
        assert kind_of(case) is row.kind
        assert row.moment not in UNREAD or case.seed not in used, row
        used |= {case.seed, requests.any().seed}


def test_the_seed_decides_which_requests_there_are() -> None:
    seeds = [[case.seed for case in Requests(random.Random(seed))] for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]
