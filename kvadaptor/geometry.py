"""Where each KV head of each page lies, in every width.

Invariant: the bytes of a page are constant; a group of width k holds 1/k of the heads, so the page
holds k times the tokens (Flying Serving, equation 3, section 4.2 on the KV cache adaptor). The page
is stored head-major, so slots tile it exactly. The worker calls it to size, view and re-shard its
KV memory, the coordinator to know what fits.
"""

from dataclasses import dataclass, fields


class GeometryError(ValueError):
    """Sizes that do not go together, or a negative amount; the message is one sentence."""


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
