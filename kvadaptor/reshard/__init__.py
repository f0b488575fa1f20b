"""Plans copies of KV blocks at a layout change: terms, order, blocks, assign, schedule, plan."""
