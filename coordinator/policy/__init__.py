"""The adaptive policy, which chooses a layout from measurements; pure, the clock is an argument.

`observe` builds its input, `predict` forecasts what a layout makes of the load, `decide` chooses
one and gives the reason. See ADR 0023.
"""
