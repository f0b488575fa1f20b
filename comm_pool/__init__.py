"""Communicator pool: which ranks may work together, and the ready groups that let them.

`layout` (terms and notation of a cell's partition), `plan` (the order in which every rank creates
its communicators), `head_exchange` (the heads that travel around attention in sp), `mixed`
(groups that divide two things) and `formations` (which ones were aborted) are pure: no torch, no
vLLM, no clock. A leaf: imports nothing of ours.
"""
