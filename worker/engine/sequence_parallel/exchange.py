"""vLLM adapter: the exchange of an sp group around attention, and its proof.

Before attention the ranks exchange tokens for heads, after it heads for tokens: one even all-to-all
each. Over a slow link these take as long as the adjacent matrix products, so a large step can
exchange in parts. A part travels on its own stream while the device computes the product of the
next part (before attention) or of the previous one (after it). The best number of parts is
measured.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from vllm.distributed.parallel_state import GroupCoordinator

from comm_pool.head_exchange import HeadExchange
from comm_pool.pool import all_to_all
from worker.engine.weights.layers import ViewError

PARTS_FROM_TOKENS = 2_048
"""Smaller steps exchange at once: launching their parts would take longer than computing them."""

PART_ALIGNMENT = 64
"""Large parts are a multiple of this many tokens, as kernels' tiles are."""

Compute = Callable[[torch.Tensor], torch.Tensor]
"""A matrix product that treats each row on its own."""


class Beside:
    """Runs work beside the device's current stream; on CPU inline."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # High priority: the next product's blocks would leave the collective no room to start.
            self._stream = torch.cuda.Stream(device, priority=-1)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Start the work inside after what the current stream has queued so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """Return a mark after all work so far, for `wait`."""
        return None if self._stream is None else self._stream.record_event()

    @staticmethod
    def wait(mark: torch.cuda.Event | None) -> None:
        """Let the current stream continue only after the mark."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)


class Exchange:
    """The collectives of one sp tree; `tokens` are those of the current step, unpadded."""

    def __init__(self, plan: HeadExchange, group: GroupCoordinator) -> None:
        self.plan = plan
        self.tokens = 0
        self.parts_from: tuple[tuple[int, int], ...] = ()
        """(tokens, parts), ascending: steps of at least `tokens` exchange in `parts` parts.

        Equal in all ranks of the group, whose all-to-alls would not match otherwise.
        """
        self.parts_tried: tuple[int, ...] = (1,)
        """The numbers of parts to choose from."""
        self.group = group
        self.member = int(group.rank_in_group)
        """This rank's place in the group."""
        self._beside: Beside | None = None

    def own_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """(T, ...) -> (share, ...): this rank's tokens, zero-padded at the end of the step."""
        mine = self.plan.tokens_of(self.member, self.tokens)
        return _padded(rows, self.plan.share(self.tokens) * self.plan.width)[mine.start : mine.stop]

    def all_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """(share, ...) -> (T, ...), from all ranks."""
        rows_of_all: torch.Tensor = self.group.all_gather(rows, 0)
        return rows_of_all[: self.tokens]

    def computed_to_heads(self, compute: Compute, rows: torch.Tensor) -> torch.Tensor:
        """(share, hidden) -> (T, w): `compute` each token, then all tokens of this rank's columns.

        `compute` returns (share, k·w); its column range j goes to rank j.
        """
        ranges = self._ranges(rows.shape[0])
        if len(ranges) == 1:
            return self.to_heads(compute(rows))
        beside = self._stream_of(rows.device)
        # Sent tensors must stay unchanged until they have arrived.
        sent: list[torch.Tensor] = []
        received: torch.Tensor | None = None
        for part in ranges:
            sent.append(self._by_target(compute(rows[part.start : part.stop])))
            if received is None:
                width, _, columns = sent[0].shape
                received = rows.new_empty((width, rows.shape[0], columns), dtype=sent[0].dtype)
            with beside.run():
                received[:, part.start : part.stop] = all_to_all(self.group, sent[-1])
        beside.wait(beside.mark())
        assert received is not None
        return received.flatten(0, 1)[: self.tokens]

    def computed_on_tokens(self, compute: Compute, rows: torch.Tensor) -> torch.Tensor:
        """(T, w) -> `compute` of (share, k·w): this rank's tokens with all columns."""
        share = self.plan.share(self.tokens)
        ranges = self._ranges(share)
        if len(ranges) == 1:
            return compute(self.to_tokens(rows))
        beside = self._stream_of(rows.device)
        by_target = self._by_token(rows)
        # Send all before computing any, so that no send waits for a product.
        sent = [by_target[:, part.start : part.stop].contiguous() for part in ranges]
        arrivals: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        for each in sent:
            with beside.run():
                here = all_to_all(self.group, each).transpose(0, 1).flatten(1)
            arrivals.append((here, beside.mark()))
        made = []
        for here, mark in arrivals:
            beside.wait(mark)
            # The other stream reuses this memory only after this one's queued work.
            made.append(compute(here))
        return torch.cat(made)

    def to_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """(share, k·w) -> (T, w): all tokens of this rank's columns; column range j is rank j's."""
        return all_to_all(self.group, self._by_target(rows)).flatten(0, 1)[: self.tokens]

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """(T, w) -> (share, k·w): this rank's tokens of all columns, in the order of the ranks."""
        sent = self._by_token(rows).contiguous()
        return all_to_all(self.group, sent).transpose(0, 1).flatten(1)

    @property
    def parts(self) -> int:
        """The number of parts in which the current step exchanges."""
        fitting = [parts for start, parts in self.parts_from if self.tokens >= start]
        return fitting[-1] if fitting else 1

    def _ranges(self, share: int) -> list[range]:
        size = -(-share // min(self.parts, share))
        if size >= PART_ALIGNMENT:
            size = -(-size // PART_ALIGNMENT) * PART_ALIGNMENT
        return [range(start, min(start + size, share)) for start in range(0, share, size)]

    def _by_target(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(-1, (self.plan.width, -1)).transpose(0, 1).contiguous()

    def _by_token(self, rows: torch.Tensor) -> torch.Tensor:
        share = self.plan.share(self.tokens)
        return _padded(rows, share * self.plan.width).unflatten(0, (self.plan.width, share))

    def _stream_of(self, device: torch.device) -> Beside:
        if self._beside is None:
            self._beside = Beside(device)
        return self._beside


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    missing = count - rows.shape[0]
    if not missing:
        return rows
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


def prove_exchange(exchange: Exchange, device: torch.device) -> None:
    """Prove against the plan that numbered rows arrive where they must; a group collective.

    Every value encodes its token and head, and travels with each number of parts that is tried.
    Raises `ViewError` if a wrong value arrives, but only after the last collective, so that no rank
    waits for one that has found a fault.
    """
    width = exchange.plan.width
    sizes = [1, width, 2 * width + 1]
    if len(exchange.parts_tried) > 1:
        sizes.append(2 * max(exchange.parts_tried) * PART_ALIGNMENT + 1)
    found = []
    for parts in exchange.parts_tried:
        exchange.parts_from = ((0, parts),)
        found += [_is_right(exchange, tokens, device) for tokens in sizes]
    exchange.parts_from = ()
    if not all(found):
        raise ViewError(
            f"self-test: the all-to-all of {width} ranks mixes up heads or tokens on this device: "
            "leave this width out of --widths, or cell.exchange_parts out of the configuration if "
            "it is there, and please report it."
        )


def _is_right(exchange: Exchange, tokens: int, device: torch.device) -> bool:
    plan, member = exchange.plan, exchange.member
    exchange.tokens = tokens
    columns = plan.heads_each + plan.kv_heads_each
    mine = plan.tokens_of(member, tokens)
    sent = torch.zeros((len(mine), plan.width * columns), dtype=torch.int32)
    wanted = torch.zeros((tokens, columns), dtype=torch.int32)
    for chunk in plan.before(tokens):
        heads = [*chunk.heads, *(plan.heads + head for head in chunk.kv_heads)]
        for token in chunk.tokens:
            values = torch.tensor([_label(token, head, plan) for head in heads])
            if chunk.source == member:
                start = chunk.target * columns
                sent[token - mine.start, start : start + columns] = values
            if chunk.target == member and token < tokens:
                wanted[token] = values
    back = torch.zeros((tokens, plan.heads_each), dtype=torch.int32)
    wanted_back = torch.zeros((len(mine), plan.heads), dtype=torch.int32)
    for chunk in plan.after(tokens):
        for token in (each for each in chunk.tokens if each < tokens):
            values = torch.tensor([_label(token, head, plan) for head in chunk.heads])
            if chunk.source == member:
                back[token] = values
            if chunk.target == member:
                wanted_back[token - mine.start, chunk.heads.start : chunk.heads.stop] = values

    def as_it_is(rows: torch.Tensor) -> torch.Tensor:
        return rows

    got = exchange.computed_to_heads(as_it_is, sent.to(device)).cpu()
    got_back = exchange.computed_on_tokens(as_it_is, back.to(device)).cpu()
    return bool(torch.equal(got, wanted) and torch.equal(got_back, wanted_back))


def _label(token: int, head: int, plan: HeadExchange) -> int:
    return 1 + token * (plan.heads + plan.kv_heads) + head
