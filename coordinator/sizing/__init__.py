"""What fits: the memory of a cell before it starts, and the layouts that it can serve in."""
