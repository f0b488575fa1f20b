"""A cell without devices: the task table, placement and policy of the product over modelled groups.

Discrete events; a step takes what the cost model says. It serves to compare policies over many
loads and to sweep their settings; see ADR 0024. Pure.
"""
