"""Where heads and slots lie in KV memory by their numbers alone; tests hold what is real to it."""

from kvadaptor.geometry import PageGeometry


def head_range(geometry: PageGeometry, member: int, k: int) -> range:
    """The KV heads of a member of a group of k; neighbours share one if there are too few."""
    heads = geometry.heads_per_rank(k)
    first = member // (k // geometry.slots_per_page(k)) * heads
    return range(first, first + heads)


def slot_index(geometry: PageGeometry, page: int, slot: int, k: int) -> int:
    """The number of a slot in a layer's region: the block id that attention sees in width k."""
    return page * geometry.slots_per_page(k) + slot


def slot_byte_range(
    geometry: PageGeometry, layer: int, page: int, slot: int, k: int, num_pages: int
) -> range:
    """The bytes of a slot in the whole memory of `num_pages` pages; layers follow each other."""
    size = geometry.layer_page_bytes // geometry.slots_per_page(k)
    region = layer * num_pages * geometry.layer_page_bytes
    first = region + slot_index(geometry, page, slot, k) * size
    return range(first, first + size)
