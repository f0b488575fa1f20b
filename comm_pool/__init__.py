"""Communicator pool: which ranks may work together, and the ready groups that let them.

`layout` (words and notation of a cell's partition), `plan` (the order in which every rank creates
its communicators), `head_exchange` (which heads travel around attention in sp), `mixed` (who
computes what where sp and tp are combined) and `formations` (which ones were aborted) are pure: no
torch, no vLLM, no clock. A leaf: imports nothing of ours.
"""
