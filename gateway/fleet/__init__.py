"""The cells a gateway knows: their state, their load, and the choice of a cell for each task."""
