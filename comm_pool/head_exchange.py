"""Which member sends which heads of which tokens to which other, around attention in sp.

Before attention a member holds all heads of its share of a step's tokens and needs its own heads of
all tokens: an all-to-all, reversed afterwards (Ulysses; Shift Parallelism, section 3.2). Members
hold the same heads, hence the same KV, as in tp of that width. Pure. Invariant: every member gets
each of its heads of each token exactly once.
"""

from collections.abc import Iterator
from dataclasses import dataclass


class ExchangeError(ValueError):
    """Heads that cannot be divided evenly; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A transfer between two members: these heads of these tokens, both contiguous ranges.

    After attention only query heads travel, so `kv_heads` is empty then.
    """

    source: int
    target: int
    tokens: range
    heads: range
    kv_heads: range


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """The exchange of a model's attention inside a group of `width` members.

    `heads` are query heads, `kv_heads` KV heads of the whole model, as config.json counts them.
    Members are numbered by their place in the group, 0..width-1. Raises `ExchangeError` if members
    would hold unequal shares of the heads.

    With fewer KV heads than members, all members that share a KV head get it (Shift Parallelism,
    algorithm 1). Instead of the paper's exchange and gather, one even all-to-all sends as many
    bytes, (k - 1)/k of the tokens to each member, and saves a collective per layer.
    """

    heads: int
    kv_heads: int
    width: int

    def __post_init__(self) -> None:
        """Refuse uneven shares."""
        if min(self.heads, self.kv_heads, self.width) < 1 or self.heads % self.kv_heads:
            raise ExchangeError(
                f"{self.heads} query heads do not share {self.kv_heads} KV heads evenly."
            )
        if self.heads % self.width:
            raise ExchangeError(
                f"width {self.width} does not divide the model's {self.heads} query heads."
            )
        if self.kv_heads % self.width and self.width % self.kv_heads:
            raise ExchangeError(
                f"width {self.width} neither divides the model's {self.kv_heads} KV heads nor is a "
                "multiple of them."
            )

    @property
    def heads_each(self) -> int:
        """Query heads of a member."""
        return self.heads // self.width

    @property
    def kv_heads_each(self) -> int:
        """KV heads of a member, at least one."""
        return max(1, self.kv_heads // self.width)

    @property
    def replication(self) -> int:
        """Number of neighbouring members that hold the same KV head."""
        return max(1, self.width // self.kv_heads)

    def heads_of(self, member: int) -> range:
        """Return the query heads that a member attends with."""
        return range(member * self.heads_each, (member + 1) * self.heads_each)

    def kv_heads_of(self, member: int) -> range:
        """Return the KV heads that a member caches."""
        first = member // self.replication * self.kv_heads_each
        return range(first, first + self.kv_heads_each)

    def part(self, parts: int) -> "HeadExchange":
        """Return the exchange inside one of `parts` equal runs of neighbouring members.

        Member s of run p is member p·(width / parts) + s here. Heads are numbered from the run's
        first: add p·heads/parts to query heads and p·kv_heads // parts to KV heads.
        """
        if parts < 1 or self.width % parts:
            raise ExchangeError(f"{self.width} members do not fall into {parts} equal runs.")
        return HeadExchange(
            self.heads // parts, max(1, self.kv_heads // parts), self.width // parts
        )

    def share(self, tokens: int) -> int:
        """Return the tokens of one member; a step is padded to a multiple of the width.

        All shares are equal: unequal ones would wait for the largest, and need more than one even
        all-to-all (Shift Parallelism, section 3.2.1, load imbalance).
        """
        return -(-tokens // self.width)

    def tokens_of(self, member: int, tokens: int) -> range:
        """Return the tokens that a member computes; those from `tokens` on are padding."""
        share = self.share(tokens)
        return range(member * share, (member + 1) * share)

    def before(self, tokens: int) -> Iterator[Chunk]:
        """Yield all transfers before attention, including those of a member to itself."""
        for source in range(self.width):
            for target in range(self.width):
                yield Chunk(
                    source,
                    target,
                    self.tokens_of(source, tokens),
                    self.heads_of(target),
                    self.kv_heads_of(target),
                )

    def after(self, tokens: int) -> Iterator[Chunk]:
        """Yield all transfers after attention, including those of a member to itself."""
        for chunk in self.before(tokens):
            yield Chunk(chunk.target, chunk.source, chunk.tokens, chunk.heads, kv_heads=range(0))
