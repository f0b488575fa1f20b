"""vLLM adapter: what another group could continue of a scheduler's tasks, and what is new of them.

A switch whose plan was drafted while groups served asks for what has changed since: reading 128
tasks anew takes a millisecond, in which all their streams wait.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from worker.rank.task_state import CachedChain, RunningState, StateChange

Held = Mapping[str, Sequence[Any]]
"""vLLM's blocks of each task."""


def can_move(request: Request) -> bool:
    """Return whether a task can migrate: it has KV, and no partly computed prompt logprobs."""
    params = request.sampling_params
    tells_prompt = params is not None and params.prompt_logprobs is not None
    return request.num_computed_tokens > 0 and not (
        tells_prompt and request.num_computed_tokens < request.num_prompt_tokens
    )


def progress_since(
    states: Iterable[RunningState], movable: Iterable[Request], held: Held
) -> list[StateChange | None] | None:
    """Return what each task has got since its state was read; None in its place: it has ended.

    None for all: one has other blocks, or one that is `movable` now has no state.
    """
    now = {each.request_id: each for each in movable}
    found: list[StateChange | None] = []
    for state in states:
        request = now.pop(state.task, None)
        if request is None:
            found.append(None)
            continue
        # Blocks are only ever added, as long as the task is not preempted.
        size, losses = len(held[state.task]), request.num_preemptions
        if (size, losses) != (state.blocks.size, state.preemptions):
            return None
        computed = request.num_computed_tokens
        found.append(
            StateChange(
                request._output_token_ids[state.count :],
                list[bytes](request.block_hashes[len(state.hashes) :]),
                computed,
                computed - request.num_in_flight_tokens,
                request.prefill_stats,
            )
        )
    return None if now else found


def are_cached(pool: BlockPool, chains: Iterable[CachedChain]) -> bool:
    """Return whether the blocks of these chains are as they were when they could be hit."""
    return all(
        pool.blocks[number].block_hash is not None
        and pool.blocks[number].block_hash.startswith(block_hash)
        for chain in chains
        for number, block_hash in zip(chain.blocks.tolist(), chain.hashes, strict=True)
    )


def written_blocks(requests: Iterable[Request], held: Held, block_tokens: int) -> list[int]:
    """Return the blocks of these tasks that the in-flight step writes."""
    blocks: list[int] = []
    for request in requests:
        if request.num_in_flight_tokens:
            settled = request.num_computed_tokens - request.num_in_flight_tokens
            rest = held[request.request_id][settled // block_tokens :]
            blocks += [block.block_id for block in rest]
    return blocks
