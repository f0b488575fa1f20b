"""vLLM's scheduler for one mode: granted blocks, step plans, hand-over of running tasks."""
