"""Where each KV head of each page lies, in every width.

Invariant: the bytes of a page are constant; a group of width k holds 1/k of the heads, so the page
holds k times the tokens (Flying Serving, equation 3, section 4.2 on the KV cache adaptor). The page
is stored head-major, so slots tile it exactly. The worker calls it to size, view and re-shard its
KV memory, the coordinator to know what fits.
"""

from dataclasses import dataclass, fields


class GeometryError(ValueError):
    """Sizes that do not fit together, or an index out of range; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Sizes of a model's KV cache, in all widths.

    Memory is vLLM's `LBHNC`: per layer (L) a region of pages (B), per page its KV heads (H), per
    head N tokens, per token C = K and V contents. One page id denotes the same index in the region
    of every layer. `num_layers` counts the layers of this rank, `num_kv_heads` (H) the heads of the
    whole model, `head_dim_k` and `head_dim_v` elements, `dtype_bytes` bytes per element.
    `tokens_per_slot` (b) is the tokens of one head in a slot, the same in every mode and equal to a
    page's tokens in dp. In every method k is the width of the group, dp being k = 1. All sizes are
    positive, or `GeometryError`.
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
                f"width {k} is no multiple of the {heads} KV heads, so heads would be replicated "
                f"unequally."
            )
        return min(k, heads)

    def heads_per_rank(self, k: int) -> int:
        """Return how many KV heads each rank of the group holds, at least one."""
        return self.num_kv_heads // self.slots_per_page(k)

    def replication(self, k: int) -> int:
        """Return how many neighbouring ranks hold the same KV head.

        1 unless k > H, where heads are replicated (Shift Parallelism, algorithm 1).
        """
        return k // self.slots_per_page(k)

    def head_range(self, rank_in_group: int, k: int) -> range:
        """Return the KV heads that member `rank_in_group` (0..k-1, the leader is 0) holds.

        With replication neighbours share a head, as vLLM's `QKVParallelLinear` loads them. In a
        dp page these heads are slot `head_range(r, k).start // heads_per_rank(k)`.
        """
        heads = self.heads_per_rank(k)
        _check_index("rank_in_group", rank_in_group, k)
        first = rank_in_group // self.replication(k) * heads
        return range(first, first + heads)

    def slot_bytes(self, k: int) -> int:
        """Return the bytes of one slot in one layer; the slots of a page fill it exactly."""
        return self.heads_per_rank(k) * self._head_bytes

    def page_tokens(self, k: int) -> int:
        """Return the tokens that a page of each member holds in all: b per slot."""
        return self.tokens_per_slot * self.slots_per_page(k)

    def slot_index(self, page: int, slot: int, k: int) -> int:
        """Return the number of a slot among all slots of a layer's region, in width k.

        It is the block id that the attention kernel of that mode sees.
        """
        slots = self.slots_per_page(k)
        _check_index("slot", slot, slots)
        if page < 0:
            raise GeometryError(f"page must not be negative, but is {page}.")
        return page * slots + slot

    def slot_byte_range(self, layer: int, page: int, slot: int, k: int, num_pages: int) -> range:
        """Return the bytes of a slot within the rank's whole KV buffer of `num_pages` pages.

        Regions follow each other by layer, so `num_pages` (page 0 included) sets their distance.
        Raises `GeometryError` for a layer, page or slot out of range.
        """
        _check_index("layer", layer, self.num_layers)
        _check_index("page", page, num_pages)
        region = layer * num_pages * self.layer_page_bytes
        first = region + self.slot_index(page, slot, k) * self.slot_bytes(k)
        return range(first, first + self.slot_bytes(k))

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

    def capacity_tokens(self, num_pages: int, k: int) -> int:
        """Return the tokens that `num_pages` pages of each member hold in all.

        All given pages count: a caller that starts from `num_pages()` subtracts page 0 itself.
        """
        if num_pages < 0:
            raise GeometryError(f"num_pages must not be negative, but is {num_pages}.")
        return num_pages * self.page_tokens(k)


def _check_index(name: str, index: int, size: int) -> None:
    if not 0 <= index < size:
        raise GeometryError(f"{name} {index} is not in 0..{size - 1}.")
