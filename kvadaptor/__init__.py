"""KV cache adaptor: pages of constant bytes that hold more tokens the wider the group is.

`geometry` (bytes, slots, heads) and `pages` (ownership of pages) are pure: no torch, no vLLM, no
clock. A leaf: imports nothing of ours.
"""
