"""A cell without devices: the product's task table, placement and policy over modelled groups.

Discrete events; the cost model gives the time of a step. For comparing policies over many loads and
for sweeping their settings; see ADR 0024. Pure.
"""
