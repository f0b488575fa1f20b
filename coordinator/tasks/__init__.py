"""The task pool: queue, table, placement, shedding. Pure."""
