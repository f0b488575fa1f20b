"""vLLM's scheduler for one mode: blocks that are granted, tasks that are handed over."""
