"""What a cell is decided by: the core, and what it shows of itself and of its gateways. Pure."""
