"""The pipeline stages of a group: their order, and what connects them."""
