"""Where each layer and KV head of each page lies, in every split.

Invariant: the bytes of a page are constant; a member of a group of width k holds 1/k of the KV, so
the page holds k times the tokens (Flying Serving, equation 3, section 4.2 on the KV cache adaptor).
A page is stored layer by layer, each head-major, so ranges of layers times ranges of heads tile it
as slots. The worker calls it to size, view and re-shard its KV memory, the coordinator to know what
fits.
"""

from dataclasses import dataclass, fields


class GeometryError(ValueError):
    """Sizes that do not go together, or a negative amount; the message is one sentence."""


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """How a group divides the KV of its tokens: `pp` ranges of layers times `tp` ranges of heads.

    In dp both are 1, in tp, sp and mixed groups `pp` is 1. Members are numbered by their place in
    the group. Other numbers than powers of two raise `GeometryError`.
    """

    pp: int
    tp: int

    def __post_init__(self) -> None:
        """Refuse numbers that are no powers of two."""
        for word, count in (("pp", self.pp), ("tp", self.tp)):
            if count < 1 or count & (count - 1):
                raise GeometryError(f"{word} {count} of a split is not a power of two.")

    @property
    def width(self) -> int:
        """Members of a group, k."""
        return self.pp * self.tp

    def share_of(self, place: int) -> int:
        """Return which of the k shares of each token's KV a member computes, numbered as slots are.

        Pipeline stages run from the highest place down to the leader, which has the last layers.
        """
        stage = self.pp - 1 - place // self.tp
        return stage * self.tp + place % self.tp


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots that tile a page in one split: a grid of `rows` of layers times `columns` of heads.

    A slot has `layers` layers and `heads` heads of b tokens, 1/`count` of a page. Slot s lies where
    dp has layers s // `columns` · `layers` and up, heads s % `columns` · `heads` and up; a member
    may keep its own layers and heads in any of them.
    """

    rows: int
    columns: int
    layers: int
    heads: int

    @property
    def count(self) -> int:
        """Slots of a page."""
        return self.rows * self.columns

    def first_blocks(self, num_pages: int) -> tuple[int, ...]:
        """Return the block of each slot of page 0, in a memory of `num_pages` (N) pages.

        A block is 1/`columns` of a page's bytes in a layer, and blocks are numbered through the
        regions of all layers. The l-th layer of a slot is seen from region l on, so a slot has one
        number in all its layers: (s // `columns` · `layers` · N + page) · `columns` + s %
        `columns`. With one row, that is `columns` · page + s.
        """
        row = self.layers * num_pages * self.columns
        return tuple(slot // self.columns * row + slot % self.columns for slot in range(self.count))

    def num_blocks(self, num_pages: int) -> int:
        """Return how many blocks that are, so that the last layer's last one ends the memory."""
        return self.first_blocks(num_pages)[-1] + (num_pages - 1) * self.columns + 1


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Sizes of a model's KV cache, in all splits.

    Memory is vLLM's `LBHNC`: per layer (L) a region of pages (B), per page its KV heads (H), per
    head N tokens, per token C = K and V contents. One page id denotes the same index in the region
    of every layer. `num_layers` counts the layers of this rank, `num_kv_heads` (H) the heads of the
    whole model, `head_dim_k` and `head_dim_v` elements, `dtype_bytes` bytes per element.
    `tokens_per_slot` (b) is the tokens of one head in a slot, the same in every mode and equal to a
    page's tokens in dp. In every method k is the width of a group that divides heads alone, dp
    being k = 1. All sizes are positive, or `GeometryError`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype_bytes: int
    tokens_per_slot: int

    def __post_init__(self) -> None:
        """Refuse sizes that are not positive."""
        for field in fields(self):
            size = getattr(self, field.name)
            if size < 1:
                raise GeometryError(f"{field.name} must be at least 1, not {size}.")

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of one page in the region of one layer: H x b x (K and V of a token)."""
        return self.num_kv_heads * self._head_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers: the unit of a rank's KV memory."""
        return self.num_layers * self.layer_page_bytes

    @property
    def _head_bytes(self) -> int:
        """Bytes of one head's b tokens in one layer."""
        return self.tokens_per_slot * (self.head_dim_k + self.head_dim_v) * self.dtype_bytes

    def slots(self, split: Split) -> Slots:
        """Return the slots that tile a page in this split.

        Raises `GeometryError` if `pp` does not divide the layers, and as `slots_per_page` does for
        `tp`.
        """
        if self.num_layers % split.pp:
            raise GeometryError(
                f"{split.pp} stages do not divide the {self.num_layers} layers, so ranks would "
                "hold unequal shares."
            )
        return Slots(
            rows=split.pp,
            columns=self.slots_per_page(split.tp),
            layers=self.num_layers // split.pp,
            heads=self.heads_per_rank(split.tp),
        )

    def slots_per_page(self, k: int) -> int:
        """Return how many slots tile a page: k, or H if there are more ranks than heads.

        Raises `GeometryError` for a k that neither divides H nor is a multiple of it.
        """
        heads = self.num_kv_heads
        if k < 1:
            raise GeometryError(f"a group has at least one rank, not {k}.")
        if k < heads and heads % k:
            raise GeometryError(
                f"width {k} does not divide the {heads} KV heads, so ranks would hold unequal "
                f"shares."
            )
        if k > heads and k % heads:
            raise GeometryError(
                f"width {k} is not a multiple of the {heads} KV heads, so heads would be "
                f"replicated unequally."
            )
        return min(k, heads)

    def heads_per_rank(self, k: int) -> int:
        """Return how many KV heads each rank of the group holds, at least one."""
        return self.num_kv_heads // self.slots_per_page(k)

    def page_tokens(self, k: int) -> int:
        """Return the tokens that a page of each member holds in all: b per slot."""
        return self.tokens_per_slot * self.slots_per_page(k)

    def pages_for_tokens(self, tokens: int, k: int) -> int:
        """Return how many pages of each member hold `tokens` tokens of one request."""
        if tokens < 0:
            raise GeometryError(f"tokens must not be negative, but is {tokens}.")
        return -(-tokens // self.page_tokens(k))

    def num_pages(self, memory_bytes: int) -> int:
        """Return how many pages fit into a rank's KV memory, reserved page 0 included."""
        if memory_bytes < 0:
            raise GeometryError(f"memory_bytes must not be negative, but is {memory_bytes}.")
        return memory_bytes // self.page_bytes
