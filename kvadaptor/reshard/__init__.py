"""Plans the copies of KV blocks at a layout change: terms, blocks, assign, schedule, plan."""
