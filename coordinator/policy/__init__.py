"""The adaptive policy: which layout, from what is measured; pure, with the clock as an argument.

`observation` says what is looked at, `cost_model` how long steps take, `predict` what a layout
would make of the load, `decide` which one is wanted, and why. See ADR 0023.
"""
