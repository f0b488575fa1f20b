"""What a rank holds and borrows, in a few words for tables."""

from collections.abc import Iterable, Mapping
from typing import Any


def hold_parts(ranks: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether any rank of the admin API's answer holds only a part of the weights."""
    return any(rank.get("weights", {}).get("parts", 1) > 1 for rank in ranks)


def weights_words(rank: Mapping[str, Any]) -> str:
    """Return which part a rank holds, which layers it borrows, and its longest floor."""
    weights = rank.get("weights")
    if weights is None:
        return "-"
    if weights["parts"] == 1:
        return "all"
    words = [f"part {weights['part']} of {weights['parts']}"]
    if weights["borrow"] != "none":
        words.append(f"borrows {weights['borrow']}")
    sizes = weights["borrowing_bytes"]
    if "ring" in sizes:
        words.append(f"ring {megabytes(sizes['ring'])}")
    if weights["whole_layers"]:
        size = f" ({megabytes(sizes['whole_layers'])})" if "whole_layers" in sizes else ""
        words.append(f"{weights['whole_layers']} layers whole{size}")
    if weights["floor_ms"]:
        words.append(f"steps from {max(weights['floor_ms'].values()):.1f} ms")
    return ", ".join(words)


def phase_words(rank: Mapping[str, Any]) -> str:
    """Return what a rank does, or what became of it: its last report may be older than its end."""
    if rank.get("exited"):
        return "starting again"
    if not rank.get("available"):
        if rank.get("connected") is False:
            return "lost"
        return f"{rank['phase']}, not available"
    # It was started without its neighbours; `aileron renew` restarts all of them.
    return f"{rank['phase']}, only dp" if rank.get("degraded") else str(rank["phase"])


def pages_free(rank: Mapping[str, Any]) -> int | str:
    """Return how many pages of a rank a request can get; a process that has ended has none."""
    free = None if rank.get("exited") else rank.get("pages_free")
    return "-" if free is None else int(free)


def has_host_pages(ranks: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether any rank of the admin API's answer has KV pages in host memory."""
    return any(rank.get("gauges", {}).get("host_pages") for rank in ranks)


def host_words(rank: Mapping[str, Any]) -> str:
    """Return how many host pages of a rank have a block, and what its groups read from all."""
    gauges = rank.get("gauges", {})
    if "host_pages" not in gauges:
        return "-"
    used, pages, hits = (gauges[each] for each in ("host_pages_used", "host_pages", "host_hits"))
    return f"{used} of {pages}, {hits:,} tokens read"


def megabytes(size: int) -> str:
    """Return a size in MB, as it stands in a sentence."""
    return f"{size / 1e6:,.0f} MB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
