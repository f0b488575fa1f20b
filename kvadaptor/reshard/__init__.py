"""Plans how KV blocks move when a layout changes: terms, blocks, assignment, schedule, plan."""
